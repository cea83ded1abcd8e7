"""Paths that are not checkpoints: what they are instead, and where checkpoints are."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from ...errors import Complaints, RangeError
from ...files import stands_for

HUB = "https://huggingface.co"
NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([\w./ -]+))?", re.ASCII)
WEB_PAGES = (b"<!doctype", b"<html", b"<?xml")
FOUND = "Pass a .pth, .bin or .safetensors file, or a folder with such files; docs/checkpoints.md says where published ones are."


class HubName(NamedTuple):
    """The name of a checkpoint on a model hub."""

    repository: str
    file: str | None = None

    @property
    def command(self) -> str:
        """The shell command that downloads it to the current folder."""
        return f"hf download {self.repository}{f' {self.file}' if self.file else ''} --local-dir {self.repository.partition('/')[2]}"

    @property
    def downloaded(self) -> str:
        """The folder or file to which the command downloads it."""
        return self.repository.partition("/")[2] + (f"/{self.file}" if self.file else "")


def hub_name(path: Path) -> HubName | None:
    """The Hugging Face hub name that a missing path looks like, for example RWKV/rwkv-6-world-1b6; None if it does not.

    >>> hub_name(Path("fla-hub/gla-1.3B-100B"))
    HubName(repository='fla-hub/gla-1.3B-100B', file=None)
    >>> hub_name(Path("/models/gla.pth"))
    """
    match = NAME.fullmatch(path.as_posix().removeprefix(f"{HUB}/").removeprefix("https:/huggingface.co/"))
    return None if match is None or path.exists() or Path(path.parts[0]).is_dir() else HubName(match[1], match[2])


def refuse_missing(function: str, argument: str, path: Path, remedy: str = "", found: str = FOUND) -> None:
    """Raise RangeError if a path does not exist. The message says what it may stand for.

    ``remedy`` is for names on the hub, ``found`` for paths that resemble no other.
    """
    if path.exists():
        return
    name, value = hub_name(path), f"{str(path)!r}, which does not exist"
    if name is not None:
        value += " and has the form of a name on the Hugging Face hub"
        remedy = f"Download it with {name.command} (pip install huggingface_hub), and pass {name.downloaded}. {remedy}".rstrip()
    else:
        beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
        close = get_close_matches(path.name, beside, 1)
        remedy = f"Did you mean {str(path.with_name(close[0]))!r}?" if close else found
    complaints = Complaints(function)
    complaints.add(RangeError, argument, "an existing file or folder", value, remedy)
    complaints.raise_any()


def refuse_stand_in(function: str, argument: str, file: Path) -> None:
    """Raise RangeError for a placeholder of another file: a Git LFS pointer, or a web page."""
    with file.open("rb") as content:
        head = content.read(1024)
    reason, remedy = stands_for(head), "Run git lfs pull in its folder, or download the file itself with hf download."
    if reason is None and head.lstrip().lower().startswith(WEB_PAGES):
        reason, remedy = "a web page", "Download the file itself, not the page that shows it."
    if reason is not None:
        complaints = Complaints(function)
        complaints.add(RangeError, argument, "the file itself", f"{str(file)!r}, which is {reason}", remedy)
        complaints.raise_any()


def models_inside(folder: Path) -> str:
    """A sentence about the subfolders that are models, such as the checkpoints of a training run; empty without any."""
    found = [one for one in folder.iterdir() if (one / "config.json").is_file()]
    if not found:
        return ""
    names = sorted((one.name for one in found), key=_by_number)
    return f"It has folders with models: {', '.join(names)}. Pass one of these, as {str(folder / names[-1])!r}."


def _by_number(name: str) -> tuple[str, int]:
    """Sorts checkpoint-20 before checkpoint-100."""
    text, _, number = name.rpartition("-")
    return (text, int(number)) if number.isdecimal() else (name, -1)
