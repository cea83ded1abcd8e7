"""Linear maps with low-rank adapters (LoRA). Each token uses one adapter or none.

All adapters of a map are stacked: ``down`` [R,in] and ``up`` [out,R] hold the rows and columns of each, where R is the sum of the ranks.
``owner`` [R] is the number of the adapter of each rank. A token x gets W x + up (m * (down x)) with m = 1 where its adapter is the owner,
else 0. So the cost is R (in + out) for every token, whatever the adapters of a step are, and the result of a token does not depend on the
adapters of other tokens, to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from ..errors import Complaints, RangeError, ShapeError
from .as_written import altered
from .linear import Linear, linear

NONE = -1
"""The number that stands for no adapter."""
MULTIPLE = 16
"""R is padded to a multiple of this, the tile of tensor cores. The padding is 0 and has no owner."""

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""The tensors of one adapter, by the name of a weight W [out,in]: ``down`` [r,in] and ``up`` [out,r] of W + up down."""

_chosen: ContextVar[tuple[Tensor, Tensor] | None] = ContextVar("penstock_adapters", default=None)


@contextmanager
def chosen(tokens: Tensor, rows: Tensor | None = None) -> Iterator[None]:
    """Select the adapters of linear maps inside this block: int64 [T], one number per token.

    ``rows`` [N] are the adapters of the head's inputs, by default those of the tokens.
    """
    before = _chosen.set((tokens, tokens if rows is None else rows))
    try:
        yield
    finally:
        _chosen.reset(before)


class Adapted(Linear):
    """A linear map with its stacked adapters. It shares the weight of the map. Outside of ``chosen``, no adapter is used."""

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
        The module whose inputs are rows, not tokens.

    Raises RangeError or ShapeError for an adapter of anything but a linear map of the model, or of other sizes.
    """
    complaints, maps = Complaints("adapted"), dict(model.named_modules(remove_duplicate=False))
    parts: dict[nn.Linear, list[tuple[int, Tensor, Tensor]]] = {}
    heads = {maps[head]}
    for number, (adapter, factors) in enumerate(adapters.items()):
        for name, (down, up) in factors.items():
            one = maps.get(name.removesuffix(".weight"))
            if not isinstance(one, nn.Linear) or (type(one) is not nn.Linear and altered(one, Linear)):
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
    """A module that shares the dicts of another one, except the dict of children: these are ``known`` or made in the same way."""
    if one not in known:
        known[one] = new = copy.copy(one)
        new._modules = {name: None if child is None else _shared(child, known) for name, child in one._modules.items()}
    return known[one]
