"""States that clients save and continue from."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..engine import Engine, SequenceState
from ..errors import InvalidArgument
from .errors import Refused
from .protocol import StateCard

LOG = logging.getLogger("penstock.server")
NAME = re.compile(r"state-([0-9]{1,15})-[0-9a-f]{32}", re.ASCII)
"""The time when it was saved, in seconds, and random digits. Longer ones are no names of files."""
SUFFIX = ".safetensors"


class States:
    """The last ``most`` states that were used, as files of a folder. Servers of one model may share a folder.

    All methods read or write files. The time of a file is that of its last use.

    folder : Path, optional
        One that exists. Without it, a temporary one, which ``close`` removes.
    """

    def __init__(self, engine: Engine, most: int, folder: Path | None = None) -> None:
        self._engine, self._most = engine, most
        self._folder = folder or Path(tempfile.mkdtemp(prefix="penstock-states-"))
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True) if folder is None else None

    def below(self, name: str) -> States:
        """The states of one key, in a folder of its own: as many of each, and none of another one's."""
        folder = self._folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        return States(self._engine, self._most, folder)

    def add(self, state: SequenceState) -> str:
        """Keep a state; its name."""
        return self._keep(partial(self._engine.save_state, state))

    def add_file(self, content: bytes, most_tokens: int) -> str:
        """Keep the state in a safetensors file; its name. Raises InvalidArgument or Refused unless it fits the model."""

        def write(path: Path) -> None:
            path.write_bytes(content)
            try:
                with safe_open(str(path), "np"):
                    pass
            except SafetensorError as error:  # load_state would name the path
                raise Refused(400, f"states: the body must be a safetensors file, got another one ({error}).") from None
            count = len(self._engine.load_state(path).tokens)
            if count > most_tokens:
                raise Refused(400, f"states: a state must have at most {most_tokens} tokens, got {count}.")

        return self._keep(write)

    def get(self, name: str) -> SequenceState:
        """A state, in the host's memory. Raises Refused if there is none, and InvalidArgument if it is of another model."""
        path = self._used(name)
        try:
            state = self._engine.load_state(path)
        except InvalidArgument:
            self._path(name)  # another server may have dropped it since
            raise
        return replace(state, row=state.row.cpu())

    def content(self, name: str) -> bytes:
        """The safetensors file of a state. Raises Refused if there is none."""
        try:
            return self._used(name).read_bytes()
        except FileNotFoundError:
            raise self._absent(name) from None

    def remove(self, name: str) -> None:
        """Drop a state. Raises Refused if there is none."""
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            raise self._absent(name) from None

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
        for path in reversed(self._files()):
            with suppress(Refused):
                found.append(self.card(path.stem))
        return found

    def close(self) -> None:
        """Remove the temporary folder."""
        if self._remove_folder is not None:
            self._remove_folder()

    def _keep(self, write: Callable[[Path], None]) -> str:
        name = f"state-{int(time.time())}-{secrets.token_hex(16)}"
        part = self._folder / f"{name}.part"
        try:
            write(part)
            _mark_used(part)
            part.replace(self._folder / f"{name}{SUFFIX}")  # under its name only when it is whole
        except (OSError, SafetensorError) as error:
            raise self._broken(error) from error
        finally:
            with suppress(OSError):
                part.unlink()
        files = self._files()
        for path in files[: max(0, len(files) - self._most)]:
            path.unlink(missing_ok=True)
        return name

    def _files(self) -> list[Path]:
        """The least recently used one first."""
        found = []
        try:
            paths = list(self._folder.iterdir())
        except OSError as error:
            raise self._broken(error) from error
        for path in paths:
            if path.suffix == SUFFIX and NAME.fullmatch(path.stem):
                with suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def _path(self, name: str) -> Path:
        path = self._folder / f"{name}{SUFFIX}"
        if NAME.fullmatch(name) is None or not path.exists():
            raise self._absent(name)
        return path

    def _used(self, name: str) -> Path:
        path = self._path(name)
        with suppress(FileNotFoundError):
            _mark_used(path)
        return path

    def _broken(self, error: Exception) -> Refused:
        LOG.error("the folder of states %s", self._folder, exc_info=error)
        message = f"states: the server's folder must exist and have room, got {type(error).__name__}. The server's log has the error."
        return Refused(500, message, kind="server_error", code="states_folder")

    def _absent(self, name: str) -> Refused:
        message = f"states: the state must be one that the server keeps, got {name!r}. It keeps the last {self._most}."
        return Refused(404, message, param="state", code="state_not_found")


def _mark_used(path: Path) -> None:
    """Set a file's time to now. The system's own time of a write is that of its last tick, milliseconds ago."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))
