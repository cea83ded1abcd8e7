"""Checks of the paths that a command writes. They run before any other work, so that no result is lost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple

from ..errors import Complaints, RangeError


class Folder(NamedTuple):
    """A folder that a command writes to."""

    option: str
    path: Path
    files: tuple[str, ...]
    """Names of the files that the command writes in it."""
    folders: tuple[str, ...] = ()
    """Names of the folders that the command makes in it."""


def check_outputs(function: str, files: Mapping[str, Path | None], folder: Folder | None = None) -> None:
    """Raise RangeError for every path, by name of its option, that cannot be written or conflicts with another. Makes nothing."""
    complaints = Complaints(function)
    written = {name: path for name, path in files.items() if path is not None}
    made: dict[str, Path] = {}
    for name, path in written.items():
        _check_writable(complaints, name, path, "file")
    if folder is not None:
        _check_writable(complaints, folder.option, folder.path, "folder")
        inside = {f"{name} in {folder.option}": folder.path / name for name in folder.files}
        made = {f"{name} in {folder.option}": folder.path / name for name in folder.folders}
        for kind, paths in (("file", inside), ("folder", made)) if not complaints.found else ():
            for name, path in paths.items():
                _check_writable(complaints, name, path, kind)
        written |= inside
    if not complaints.found:
        _check_conflicts(complaints, written, made)
    complaints.raise_any()


def _check_writable(complaints: Complaints, name: str, path: Path, kind: str) -> None:
    reason = _not_writable(Path(os.path.realpath(path)), kind)
    if reason is not None:
        complaints.add(RangeError, name, f"a {kind} that can be written", f"{str(path)!r}{reason}", f"Name another {kind}.")


def _not_writable(path: Path, kind: str) -> str | None:
    """Why a file or folder cannot be written at an absolute path, or None."""
    for place in (path, *path.parents):
        try:
            is_folder = S_ISDIR(place.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            continue  # the command makes it if its parent is a folder
        except OSError as failure:
            return f": {failure.strerror}"
        if place == path and is_folder != (kind == "folder"):
            return f", which is a {'folder' if is_folder else 'file'}"
        if place != path and not is_folder:
            return f", where {str(place)!r} is a file"
        if not os.access(place, os.W_OK | os.X_OK if is_folder else os.W_OK):
            return f", where {str(place)!r} is not writable"
        break
    return None


def _check_conflicts(complaints: Complaints, files: Mapping[str, Path], folders: Mapping[str, Path]) -> None:
    """Check that no two files have the same path and that no file has the path of a folder that is needed."""
    pairs = [*combinations(files.items(), 2), *((file, folder) for file in files.items() for folder in folders.items())]
    for (name, path), (other, other_path) in pairs:
        first, second = (Path(os.path.realpath(place)) for place in (path, other_path))
        if first in (second, *second.parents) or (other in files and second in first.parents):
            complaints.add(RangeError, name, f"apart from {other}", f"{str(path)!r} and {str(other_path)!r}", "Name another file.")
            return
