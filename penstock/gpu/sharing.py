"""Results of launches that several calls on one thread share.

Inside a block ``with shared():``, a call that computes sums for others keeps them. A later call that would launch the same kernel with the
same grid, numbers and constants on the same memory takes the kept sums in place of the launch, once: it may write to them.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from torch import Tensor

Kept = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""The tensors that a launch read and wrote. Those it read stay alive, so that their addresses are not used again."""


class _Block(threading.local):
    kept: dict[Hashable, Kept] | None = None


_block = _Block()


@contextmanager
def shared() -> Iterator[None]:
    """Share results in this block. The tensors of its calls must not change in it."""
    before, _block.kept = _block.kept, {}
    try:
        yield
    finally:
        _block.kept = before


def kept() -> dict[Hashable, Kept] | None:
    """The results of this thread's block, or None outside of one."""
    return _block.kept
