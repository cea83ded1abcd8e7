"""Low-rank maps: two linear maps in a container, of which the first shares its input with other maps."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

from torch import Tensor, nn

from .as_written import altered
from .chains import Chain, plain
from .examples import Draw, examples
from .linear import Linear, linear_again


class _LowRank(NamedTuple):
    """A container of two linear maps, and its input."""

    module: nn.Module
    x: Tensor


def _refuses_maps(c: _LowRank) -> str | None:
    why = altered(c.module, nn.Sequential)
    return None if why is None else f"the container of the low-rank maps {why}"


def _draw(draw: Draw) -> _LowRank:
    maps = nn.Sequential(Linear(40, 8, bias=False), Linear(8, 24))
    return _LowRank(draw.module("maps", maps, 0.2), draw("x", 1, 3, 40))


LOW_RANK: Chain[_LowRank, list[nn.Module]] = Chain(
    "low_rank_parts",
    plain("maps", lambda c: list(c.module.children()), _refuses_maps, examples(_draw)),
    plain("module", lambda c: []),
    formula=lambda c: c.module(c.x),
    results=lambda c, maps: reduce(lambda x, one: one(x), maps, c.x),
)
"""The maps that are called one by one, the first one together with others of the same input; none if the container itself is called."""


def low_rank_parts(module: nn.Module, x: Tensor) -> list[nn.Module]:
    """The two maps of a container, or nothing if the container itself is called."""
    return LOW_RANK(_LowRank(module, x))


def low_rank(module: nn.Module, x: Tensor, parts: list[nn.Module], first: list[Tensor]) -> Tensor:
    """The result of a container for x. ``parts`` are those of ``low_rank_parts``; ``first`` begins with the result of the first one."""
    y: Tensor = linear_again(first[0], parts[1]) if parts else module(x)
    return y
