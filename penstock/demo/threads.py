"""How many CPU threads a small model is quickest with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def quickest_threads(work: Callable[[], object]) -> Iterator[int]:
    """Within, torch has as many threads as make ``work`` quickest: 1, 2, 4, ... up to its own number, while that helps.

    Threads wait for each other after every operation. Two of them train the model of ``train.py`` with 8,000 bytes a
    second on two free cores, and with 200 to 600 on the same cores beside two other busy programs; one thread does 5,000.

    >>> with quickest_threads(lambda: None) as threads:
    ...     threads == torch.get_num_threads()
    True
    """
    most = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work()  # the first run of anything is slower
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
