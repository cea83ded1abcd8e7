"""Where a command writes: checked before it does anything else, so that no work is lost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple

from ..errors import Complaints, RangeError


class Folder(NamedTuple):
    """A folder that a command writes files to."""

    option: str
    path: Path
    files: tuple[str, ...]
    """Their names."""


def check_outputs(function: str, files: Mapping[str, Path | None], folder: Folder | None = None) -> None:
    """Raise RangeError for every path, by name of its option, that cannot be written or is in the way of another. Nothing is made."""
    complaints = Complaints(function)
    given = {name: path for name, path in files.items() if path is not None}
    for name, path in given.items():
        _check(complaints, name, path, "file")
    if folder is not None:
        _check(complaints, folder.option, folder.path, "folder")
        inside = {f"{name} in {folder.option}": folder.path / name for name in folder.files}
        for name, path in inside.items() if not complaints.found else ():
            _check(complaints, name, path, "file")
        given |= inside
    for (name, path), (other, taken) in combinations(given.items(), 2):
        one, two = (Path(os.path.abspath(place)) for place in (path, taken))
        if not complaints.found and (one in (two, *two.parents) or two in one.parents):
            complaints.add(RangeError, name, f"apart from {other}", f"{str(path)!r} and {str(taken)!r}", "Name another file.")
    complaints.raise_any()


def _check(complaints: Complaints, name: str, path: Path, kind: str) -> None:
    obstacle = _obstacle(path.absolute(), kind)
    if obstacle is not None:
        complaints.add(RangeError, name, f"a {kind} that can be written", f"{str(path)!r}{obstacle}", f"Name another {kind}.")


def _obstacle(path: Path, kind: str) -> str | None:
    """Why a file or folder cannot be written there, or None."""
    for place in (path, *path.parents):
        try:
            folder = S_ISDIR(place.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            continue  # it is made later, if what is above it is a folder
        except OSError as failure:
            return f": {failure.strerror}"
        if place == path and folder != (kind == "folder"):
            return f", which is a {'folder' if folder else 'file'}"
        if place != path and not folder:
            return f", where {str(place)!r} is a file"
        if not os.access(place, os.W_OK | os.X_OK if folder else os.W_OK):
            return f", where {str(place)!r} is not writable"
        break
    return None
