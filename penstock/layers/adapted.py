"""Linear maps with low-rank adapters (LoRA), of which each token has one or none.

All adapters of a map are stacked: ``down`` [R,in] and ``up`` [out,R] have the rows and columns of each, R in total, and ``owner`` [R] says
whose they are. A token x gets W x + up (m * (down x)) with m = 1 where its adapter is the owner, else 0. So the cost is R (in + out) for
every token, whatever the adapters of a step are, and the bits of a token do not depend on those of other tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from ..errors import Complaints, RangeError, ShapeError
from .as_written import runs_as_written
from .linear import Linear, linear

NONE = -1
"""In the place of an adapter's number: no adapter."""
MULTIPLE = 16
"""R is rounded up to a multiple of it: tensor cores read so many at a time. The padding is 0 and has no owner."""

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""Of one adapter, by the name of a weight W [out,in]: ``down`` [r,in] and ``up`` [out,r] of W + up down."""

_chosen: ContextVar[tuple[Tensor, Tensor] | None] = ContextVar("penstock_adapters", default=None)


@contextmanager
def chosen(tokens: Tensor, rows: Tensor | None = None) -> Iterator[None]:
    """Maps inside use these adapters: int64 [T], of each token; ``rows`` [N] are those of what the head gets, by default the same."""
    before = _chosen.set((tokens, tokens if rows is None else rows))
    try:
        yield
    finally:
        _chosen.reset(before)


class Adapted(Linear):
    """A linear map with the stacked adapters of it. Outside of ``chosen``, without any. It shares the weight of the map."""

    down: Tensor
    up: Tensor
    owner: Tensor

    def __init__(self, one: nn.Linear, parts: list[tuple[int, Tensor, Tensor]], head: bool) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(one.__dict__)  # the dicts of its parameters and hooks are shared
        self._buffers, self._non_persistent_buffers_set = {}, set()
        like, self._head = one.weight, int(head)
        ranks = [len(down) for _, down, _ in parts]
        rest = -sum(ranks) % MULTIPLE
        down = torch.cat([down.to(like) for _, down, _ in parts] + [like.new_zeros(rest, like.shape[1])])
        up = torch.cat([up.to(like) for _, _, up in parts] + [like.new_zeros(like.shape[0], rest)], 1)
        owners = [number for (number, _, _), rank in zip(parts, ranks) for _ in range(rank)] + [NONE - 1] * rest
        owner = torch.tensor(owners, device=like.device)
        for name, x in (("down", down), ("up", up.contiguous()), ("owner", owner)):
            self.register_buffer(name, x.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [...,in] to [...,out]."""
        y, given = linear(x, self.weight, self.bias), _chosen.get()
        if given is None:
            return y
        own = given[self._head].view(*x.shape[:-1], 1) == self.owner
        return y + linear(torch.where(own, linear(x, self.down), 0.0), self.up)


def adapted(model: nn.Module, adapters: Mapping[str, Factors], head: str = "head") -> nn.Module:
    """A model with adapters, numbered in their order. Its modules are new ones that share the parameters, buffers and hooks of ``model``.

    head : str
        The module that gets rows, not tokens.

    Raises RangeError or ShapeError for an adapter of something that is not a linear map of the model, or of other sizes.
    """
    complaints, maps = Complaints("adapted"), dict(model.named_modules(remove_duplicate=False))
    parts: dict[nn.Linear, list[tuple[int, Tensor, Tensor]]] = {}
    heads = {maps[head]}
    for number, (adapter, factors) in enumerate(adapters.items()):
        for name, (down, up) in factors.items():
            one = maps.get(name.removesuffix(".weight"))
            if not isinstance(one, nn.Linear) or not (runs_as_written(one, Linear) or type(one) is nn.Linear):
                remedy = "Merge it: penstock convert --adapter."
                complaints.add(RangeError, "adapter", "one of linear maps, to be chosen by requests", f"{name} in {adapter!r}", remedy)
            elif down.shape[1:] != one.weight.shape[1:] or up.shape[:1] != one.weight.shape[:1] or down.shape[0] != up.shape[1]:
                rule = f"one whose factors of {name} fit {list(one.weight.shape)}"
                complaints.add(ShapeError, "adapter", rule, f"{list(down.shape)} and {list(up.shape)} in {adapter!r}")
            elif len(down):
                parts.setdefault(one, []).append((number, down, up))
    complaints.raise_any()
    known: dict[nn.Module, nn.Module] = {one: Adapted(one, some, one in heads) for one, some in parts.items()}
    return _shared(model, known)


def _shared(one: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """A module with the dicts of another one, apart from that of its children, which are ``known`` or made likewise."""
    if one not in known:
        known[one] = new = copy.copy(one)
        new._modules = {name: None if child is None else _shared(child, known) for name, child in one._modules.items()}
    return known[one]
