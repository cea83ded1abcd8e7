"""Results of launches that several calls on one thread share.

Inside a block ``with shared():``, a call that computes results for others keeps them. A later call that would launch the same kernel with
the same grid, numbers and constants on the same memory takes the kept results in place of the launch. A plan that may write to them takes
them for good, one that does not (``Plan.keeps``) leaves them for others. ``once`` shares what PyTorch computes from the same tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

Kept = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""The tensors that a launch read and wrote. Those it read stay alive, so that their addresses are not used again."""


T = TypeVar("T")


class _Block(threading.local):
    kept: dict[Hashable, Kept] | None = None
    made: dict[Hashable, tuple[Sequence[Tensor], Any]]
    """What ``once`` has made, and from which tensors. These stay alive, so that no others have their identities."""


_block = _Block()


@contextmanager
def shared() -> Iterator[None]:
    """Share results in this block. The tensors of its calls must not change in it."""
    before, _block.kept = _block.kept, {}
    outside, _block.made = getattr(_block, "made", {}), {}
    try:
        yield
    finally:
        _block.kept, _block.made = before, outside


def kept() -> dict[Hashable, Kept] | None:
    """The results of this thread's block, or None outside of one."""
    return _block.kept


def once(key: Hashable, read: Sequence[Tensor], make: Callable[[], T]) -> T:
    """What ``make`` returns, for the same key and the same tensors once in a block. Outside of a block, it is called."""
    if _block.kept is None:
        return make()
    whole = key, *map(id, read)
    found = _block.made.get(whole)
    if found is None:
        found = _block.made[whole] = read, make()
    made: T = found[1]
    return made
