"""The background thread of an engine."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class Stepping(Protocol):
    """The interface of an engine for the thread."""

    def step(self) -> bool:
        """Run one step. Returns whether there was anything to do."""


class StepThread:
    """Runs steps while there is anything to do, else waits for ``wake``.

    It references its engine only during steps. So an engine without other references is collected after its last request, and the thread
    ends.
    """

    def __init__(self) -> None:
        self.wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = False

    def start(self, engine: Stepping) -> None:
        """Begin, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(weakref.ref(engine),), name="penstock-engine", daemon=True)
            self._thread.start()
            weakref.finalize(engine, self.end)  # also at interpreter exit, where a thread inside torch aborts the process

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def end(self, wait: bool = True) -> None:
        """End the thread after its step. Thread-safe. A caller that holds a lock that a step needs must not wait."""
        self._ended = True
        self.wake.set()
        if wait and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, found: weakref.ref[Stepping]) -> None:
        while True:
            self.wake.clear()
            engine = found()
            if self._ended or engine is None:  # after clear: end sets _ended first
                return
            if not engine.step():
                del engine
                self.wake.wait()
