"""Text of users, read in one way; the standard streams, which write every text; and the modes of written files."""

from __future__ import annotations

import re
import sys
import warnings
from io import TextIOWrapper
from pathlib import Path

from .errors import Complaints, PenstockWarning, RangeError

BOM = "\ufeff"
"""The byte-order mark, as a character."""
ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
"""Encodings that the first bytes of a file tell."""


def read_text(path: Path, function: str, argument: str) -> str:
    """The text of a file in UTF-8, or of standard input if the path is ``-``. Each character is kept: its UTF-8 is the file's bytes.

    Line ends stay as they are, and so does a byte-order mark, with a PenstockWarning, because it is a character of the text for a model.
    Raises RangeError, in the name of ``function`` and ``argument``, for files that cannot be read or are not UTF-8.
    """
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        _refuse(function, argument, path, error.strerror or str(error), "")
        raise
    pointer = stands_for(content)
    if pointer is not None:
        _refuse(function, argument, path, f"it is {pointer}", "Run git lfs pull in its folder.")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{content[error.start]:02x} at {error.start}, in line {line}: {error.reason}"
        encoding = ENCODINGS.get(content[:2], "ENCODING")
        _refuse(function, argument, path, found, f"Convert it: iconv -f {encoding} -t UTF-8 FILE > NEW.")
        raise
    if text.startswith(BOM):
        rule = f"{function}: {argument} {str(path)!r} begins with a byte-order mark, which is read as a character of the text."
        warnings.warn(f"{rule} Remove it if it is not meant: sed -i '1s/^\\xEF\\xBB\\xBF//' FILE.", PenstockWarning, stacklevel=2)
    return text


def stands_for(content: bytes) -> str | None:
    """A description of a Git LFS pointer, which stands for a large file in a clone without git-lfs; None for other files.

    content : bytes
        The first 1024 bytes, or all.
    """
    if not content.startswith(b"version https://git-lfs.github.com/spec/") or len(content) > 1024:
        return None
    size = re.search(rb"^size ([0-9]{1,18})$", content, re.MULTILINE)
    return "a Git LFS pointer" + (f" to a file of {int(size[1]):,} bytes" if size else "")


def _refuse(function: str, argument: str, path: Path, reason: str, remedy: str) -> None:
    complaints = Complaints(function)
    complaints.add(RangeError, argument, "a text file in UTF-8", f"{str(path)!r} ({reason})", remedy)
    complaints.raise_any()


FAILING = ("strict", "surrogateescape")
"""Handlers of errors that fail for characters that an encoding lacks."""


def escape_unwritable() -> None:
    r"""Write what the encoding of the console lacks as escapes, as in ``\u4e16``. A handler that the user chose stays."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors in FAILING:
            stream.reconfigure(errors="backslashreplace")


def usual_mode(path: Path) -> None:
    """Give a file the mode of files that ``open`` makes in its folder. Some packages make files that only their user can read."""
    probe = path.with_name(f".{path.name}.mode")
    with probe.open("xb"):
        mode = probe.stat().st_mode
    probe.unlink()
    path.chmod(mode & 0o777)
