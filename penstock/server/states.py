"""States that clients save and continue from."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..engine import Engine, SequenceState
from ..errors import InvalidArgument, shortened
from .errors import Refused, refusal
from .parts import Parts
from .protocol import StateCard

LOG = logging.getLogger("penstock.server")
NAME = re.compile(r"state-([0-9]{1,15})-[0-9a-f]{32}", re.ASCII)
"""The time when it was saved, in seconds, and random digits. Longer ones are no names of files."""
SUFFIX = ".safetensors"
TICK = 1000
"""Nanoseconds between two uses at least. File systems round times of files, most of them to less than this."""


def new_name() -> str:
    """A name that no state has."""
    return f"state-{int(time.time())}-{secrets.token_hex(16)}"


class States:
    """The last ``most`` states that were used, as files of a folder. Servers of one model may share a folder.

    All methods read or write files. The time of a file is that of its last use. A use is later than all earlier ones, also where the clock
    was set back or another host's clock is ahead. What is no regular file, such as a link, is no state.

    folder : Path, optional
        One that exists. Without it, a temporary one, which ``close`` removes.
    """

    def __init__(self, engine: Engine, most: int, folder: Path | None = None) -> None:
        self._engine, self._most = engine, most
        self._folder = folder or Path(tempfile.mkdtemp(prefix="penstock-states-"))
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True) if folder is None else None
        self._parts = Parts(self._folder)
        self._parts.remove_left()

    def below(self, name: str) -> States:
        """The states of one key, in a folder of its own: as many of each, and none of another's. Raises Refused if it cannot be made."""
        folder = self._folder / name
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise self._broken(error) from error
        return States(self._engine, self._most, folder)

    def add(self, states: Sequence[SequenceState]) -> list[str | Refused]:
        """Keep states; of each the name, or why it cannot be kept."""
        found: list[str | Refused] = []
        for state in states:
            try:
                found.append(self._write(partial(self._engine.save_state, state)))
            except Exception as error:  # the states are lost, not the answer that they come with
                found.append(refusal(error))
        with suppress(Refused):  # it was logged; the next one evicts these
            self._evict([name for name in found if isinstance(name, str)])
        return found

    def add_named(self, name: str, state: SequenceState, notes: Mapping[str, str]) -> None:
        """Keep a state under a name of ``new_name``, with texts beside it."""
        self._write(lambda path: self._engine.save_state(state, path, notes), name)
        self._evict([name])

    def notes(self, name: str) -> dict[str, str]:
        """The texts beside a state, and what it is. Raises Refused if there is none, or a damaged file."""
        path = self._path(name)
        try:
            with safe_open(str(path), "np") as file:
                return file.metadata() or {}
        except (OSError, SafetensorError):
            raise self._absent(name) from None

    def add_file(self, content: bytes, most_tokens: int) -> str:
        """Keep the state in a safetensors file; its name. Raises InvalidArgument or Refused unless it fits the model."""

        def write(path: Path) -> None:
            path.write_bytes(content)
            try:
                with safe_open(str(path), "np"):
                    pass
            except SafetensorError as error:
                raise Refused(400, f"states: the body must be a safetensors file, got another one ({error}).") from None
            count = len(self._load(path, "the body").tokens)
            if count > most_tokens:
                raise Refused(400, f"states: a state must have at most {most_tokens} tokens, got {count}.")

        name = self._write(write)
        self._evict([name])
        return name

    def get(self, name: str) -> SequenceState:
        """A state, in the host's memory. Raises Refused if there is none, or it is damaged or of another model."""
        path = self._used(name)
        try:
            state = self._load(path, name)
        except (Refused, InvalidArgument):
            self._path(name)  # another server may have dropped it since
            raise
        return replace(state, row=state.row.cpu())

    def content(self, name: str) -> bytes:
        """The safetensors file of a state. Raises Refused if there is none, or a damaged file."""
        self.card(name)
        try:
            with open(os.open(self._used(name), os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                return file.read()
        except FileNotFoundError:
            raise self._absent(name) from None
        except OSError as error:
            raise self._broken(error) from error

    def remove(self, name: str) -> None:
        """Drop a state. Raises Refused if there is none."""
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            raise self._absent(name) from None
        except OSError as error:
            raise self._broken(error) from error

    def card(self, name: str) -> StateCard:
        """What clients see of a state. Raises Refused if there is none, or a damaged file."""
        path = self._path(name)
        try:
            with safe_open(str(path), "np") as file:  # "pt" opens it again
                tokens = int(file.metadata()["tokens"])
            return StateCard(id=name, created=int(name.split("-")[1]), tokens=tokens, bytes=path.stat().st_size)
        except (OSError, SafetensorError, TypeError, KeyError, ValueError):
            raise self._absent(name) from None

    def cards(self) -> list[StateCard]:
        """Of all states, the last used one first."""
        found = []
        for _, path in reversed(self._files()):
            with suppress(Refused):
                found.append(self.card(path.stem))
        return found

    def close(self) -> None:
        """Remove the temporary folder, and files that were not written to their ends."""
        self._parts.close()
        if self._remove_folder is not None:
            self._remove_folder()

    def _write(self, write: Callable[[Path], None], name: str | None = None) -> str:
        """Write a state as the last used one; its name."""
        name = name or new_name()
        part = None
        try:
            part = self._parts.path(name)
            write(part)
            self._mark_used(part)
            part.replace(self._folder / f"{name}{SUFFIX}")  # under its name only when it is whole
        except (OSError, SafetensorError) as error:
            raise self._broken(error) from error
        finally:
            if part is not None:
                with suppress(OSError):
                    part.unlink()
        return name

    def _evict(self, written: Sequence[str]) -> None:
        """Drop the least recently used states above ``most``: of those before what was just written, which may be used next."""
        files = self._files()
        first = next((place for place, (_, path) in enumerate(files) if path.stem in written), 0)
        for _, path in files[: min(first, max(0, len(files) - self._most))]:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise self._broken(error) from error

    def _files(self) -> list[tuple[int, Path]]:
        """The times of all states, and their files: the least recently used one first."""
        found = []
        try:
            paths = list(self._folder.iterdir())
        except OSError as error:
            raise self._broken(error) from error
        for path in paths:
            if path.suffix == SUFFIX and NAME.fullmatch(path.stem):
                with suppress(FileNotFoundError):
                    about = path.lstat()
                    if stat.S_ISREG(about.st_mode):
                        found.append((about.st_mtime_ns, path))
        return sorted(found)

    def _load(self, path: Path, name: str) -> SequenceState:
        """Read a file. Errors have ``name`` in place of the path."""
        try:
            return self._engine.load_state(path)
        except InvalidArgument as error:
            raise type(error)(str(error).replace(repr(str(path)), name).replace(str(path), name)) from None

    def _path(self, name: str) -> Path:
        path = self._folder / f"{name}{SUFFIX}"
        if NAME.fullmatch(name) is None:
            raise self._absent(name)
        try:
            regular = stat.S_ISREG(path.lstat().st_mode)
        except OSError:
            regular = False
        if not regular:
            raise self._absent(name)
        return path

    def _used(self, name: str) -> Path:
        path = self._path(name)
        try:
            self._mark_used(path)
        except FileNotFoundError:
            raise self._absent(name) from None
        except OSError as error:
            raise self._broken(error) from error
        return path

    def _mark_used(self, path: Path) -> None:
        """Set a file's time to now, or after all others. The system's own time of a write is that of its last tick, milliseconds ago."""
        latest = max((used for used, other in self._files() if other != path), default=0)
        now = max(time.time_ns(), latest + TICK)
        os.utime(path, ns=(now, now))

    def _broken(self, error: Exception) -> Refused:
        LOG.error("the folder of states %s", self._folder, exc_info=error)
        message = f"states: the server's folder must exist and have room, got {type(error).__name__}. The server's log has the error."
        return Refused(500, message, kind="server_error", code="states_folder")

    def _absent(self, name: str) -> Refused:
        message = f"states: the state must be one that the server keeps, got {shortened(name)}. It keeps the last {self._most}."
        return Refused(404, message, param="state", code="state_not_found")
