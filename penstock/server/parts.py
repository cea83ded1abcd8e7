"""Files that are being written to a folder of several servers, and what killed servers leave of them."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

LOG = logging.getLogger("penstock.server")
SUFFIX = ".part"
LOCK = "lock"


class Parts:
    """A place inside of a folder for files that are not whole yet. It belongs to one server, which holds a lock of it as long as it runs.

    What packages write beside a file, such as their own temporary ones, is in there too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place: Path | None = None
        self._release: weakref.finalize[..., Parts] | None = None

    def path(self, name: str) -> Path:
        """Where to write a file. Raises OSError if the folder takes none."""
        if self._place is None or not self._place.is_dir():
            self._make()
        assert self._place is not None
        return self._place / name

    def close(self) -> None:
        """Remove the place."""
        if self._release is not None:
            self._release()

    def remove_left(self) -> None:
        """Remove those of servers that run no more: nobody holds their locks. Where locks are not supported, they stay."""
        for path in self._folder.glob(f"*{SUFFIX}"):
            try:
                if _is_left(path):
                    _remove(path)
                    LOG.info("removed %s of a server that was killed", path)
            except OSError as error:  # another server that starts may remove it as well
                LOG.warning("%s stays in the folder of states", path, exc_info=None if isinstance(error, FileNotFoundError) else error)

    def _make(self) -> None:
        self.close()
        made = Path(tempfile.mkdtemp(prefix=".penstock-", dir=self._folder))
        descriptor = os.open(made / LOCK, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
        with suppress(OSError):  # where locks are not supported, no server removes it
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._place = made.rename(made.with_name(f"{made.name.lstrip('.')}{SUFFIX}"))  # others see it with its lock only
        self._release = weakref.finalize(self, _discard, self._place, descriptor)


def _is_left(path: Path) -> bool:
    """Whether nobody holds the lock: of a file, its own. A link is nobody's part."""
    if path.is_symlink() or not (path.is_dir() or path.is_file()):
        return False
    descriptor = os.open(path / LOCK if path.is_dir() else path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _discard(place: Path, descriptor: int) -> None:
    shutil.rmtree(place, ignore_errors=True)
    os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
