"""The fastest number of CPU threads for a small model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fastest_threads(work: Callable[[], object]) -> Iterator[int]:
    """Set the fastest number of torch's threads for ``work`` within a block: 1, 2, 4, ... up to the current number, while it helps.

    Threads synchronize after every operation. Two threads train the model of ``train.py`` with 8,000 bytes per second on two
    idle cores, and with 200 to 600 if two other programs use the same cores; one thread trains with 5,000.

    >>> with fastest_threads(lambda: None) as threads:
    ...     threads == torch.get_num_threads()
    True
    """
    most = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work()  # the first run is slower
        best, threads = _seconds(work), 1
        while 2 * threads <= most:
            torch.set_num_threads(2 * threads)
            seconds = _seconds(work)
            if seconds >= best:
                break
            best, threads = seconds, 2 * threads
        torch.set_num_threads(threads)
        yield threads
    finally:
        torch.set_num_threads(most)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
