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
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Complaints, RangeError, ShapeError
from .as_written import altered
from .linear import Linear, linear
from .quantized import QuantizedLinear

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


Map = nn.Linear | QuantizedLinear


class Adapted(Linear):
    """A linear map with its stacked adapters, which shares the map's weight, quantized or not. Outside of ``chosen``, it uses none."""

    down: Tensor
    up: Tensor
    owner: Tensor

    def __init__(self, one: Map, parts: list[tuple[int, Tensor, Tensor]], head: bool) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(one.__dict__)  # the dicts of its parameters and hooks are shared
        self._buffers, self._non_persistent_buffers_set = dict(one._buffers), set()
        like, self._head = one.scales.to(one.dtype) if isinstance(one, QuantizedLinear) else one.weight, int(head)
        self._map: Any = QuantizedLinear.forward if isinstance(one, QuantizedLinear) else Linear.forward
        ranks = [len(down) for _, down, _ in parts]
        rest = -sum(ranks) % MULTIPLE
        down = torch.cat([down.to(like) for _, down, _ in parts] + [like.new_zeros(rest, one.in_features)])
        up = torch.cat([up.to(like) for _, _, up in parts] + [like.new_zeros(one.out_features, rest)], 1)
        owners = [number for (number, _, _), rank in zip(parts, ranks) for _ in range(rank)] + [NONE - 1] * rest
        owner = torch.tensor(owners, device=like.device)
        for name, x in (("down", down), ("up", up.contiguous()), ("owner", owner)):
            self.register_buffer(name, x.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [...,in] to [...,out]."""
        y: Tensor = self._map(self, x)
        given = _chosen.get()
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
    complaints, maps = Complaints("Engine"), dict(model.named_modules(remove_duplicate=False))
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    parts: dict[Map, list[tuple[int, Tensor, Tensor]]] = {}
    heads = {maps[head]}
    for number, (adapter, factors) in enumerate(adapters.items()):
        for name, (down, up) in factors.items():
            one = maps.get(name.removesuffix(".weight"))
            if not isinstance(one, Map) and name not in weights:
                remedy = "Names are those of model.named_parameters()."
                complaints.add(RangeError, "adapters", "of weights of the model", f"{name or repr(name)} in {adapter!r}", remedy)
            elif not isinstance(one, Map) or (type(one) is not nn.Linear and altered(one, Linear, QuantizedLinear)):
                remedy = "Merge it: penstock convert --adapter."
                complaints.add(RangeError, "adapters", "of linear maps, to be chosen by requests", f"{name} in {adapter!r}", remedy)
            elif [*up.shape[:1], *down.shape[1:]] != (sizes := [one.out_features, one.in_features]) or down.shape[0] != up.shape[1]:
                rule = f"of factors of {name} that fit {sizes}"
                complaints.add(ShapeError, "adapters", rule, f"{list(down.shape)} and {list(up.shape)} in {adapter!r}")
            elif len(down):
                parts.setdefault(one, []).append((number, down, up))
    complaints.raise_any()
    known: dict[nn.Module, nn.Module] = {one: Adapted(one, some, one in heads) for one, some in parts.items()}
    return sharing(model, known)


def sharing(one: nn.Module, known: dict[Any, nn.Module]) -> nn.Module:
    """A module that shares the dicts of another one, except the dict of children: these are ``known`` or made in the same way."""
    if one not in known:
        known[one] = new = copy.copy(one)
        new._modules = {name: None if child is None else sharing(child, known) for name, child in one._modules.items()}
    return known[one]
