"""Initial states and adapters of an engine's model. Each request may name one of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import Complaints, DtypeError, RangeError, described
from ..layers.adapted import NONE, Factors, adapted
from ..models import CausalLM, State
from ..models.arguments import check_state, named_tensors
from .state_pool import StatePool


class Tuning:
    """A tuning: an initial state in place of the model's own, or an adapter of its linear maps.

    row : Tensor, optional
        The initial state as a row of the pool [W].
    adapter : int
        The number of an adapter, or ``NONE``.
    weights : iterable of str
        The names of the weights that an adapter changes.
    """

    def __init__(
        self, name: str, tensors: Iterable[Tensor], row: Tensor | None = None, adapter: int = NONE, weights: Iterable[str] = ()
    ) -> None:
        self.name, self.row, self.adapter = name, row, adapter
        self._tensors, self._weights = list(tensors), list(weights)
        self._hash: str | None = None

    def model_hash(self, base: str) -> str:
        """The fingerprint of the tuned model. States of the base model, or of another tuning, cannot continue with this one."""
        if self._hash is None:
            digest = hashlib.sha256(base.encode())
            if self._weights:
                digest.update(repr(self._weights).encode())
            for x in self._tensors:
                digest.update(f"{x.dtype} {list(x.shape)}".encode())
                digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            self._hash = digest.hexdigest()
        return self._hash


def check_tunings(complaints: Complaints, model: CausalLM, states: object, adapters: object) -> None:
    """Check the mappings of ``Engine``."""
    for argument, given, kind in (("states", states, "initial states"), ("adapters", adapters, "adapters")):
        if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
            complaints.add(DtypeError, argument, f"a mapping of names to {kind}", described(given))
            complaints.raise_any()
    assert isinstance(states, Mapping)
    assert isinstance(adapters, Mapping)
    if states and any(one.grows for one in model.config.mixers):
        rule, remedy = "empty for a model with softmax attention", "Its initial state is that of no tokens. Adapters work."
        complaints.add(RangeError, "states", rule, f"{len(states)} of them", remedy)
    for name in states.keys() & adapters.keys():
        complaints.add(RangeError, "adapters", "of other names than states", repr(name), "A request names one of both.")
    complaints.raise_any()
    for name, state in states.items():
        device = next((x.device for _, x in named_tensors(state)), None) if isinstance(state, list) else None
        check_state(complaints, state, model._initial_state(0, model.like(device)), 1, written=False)
        complaints.raise_any()
        if not all(bool(x.isfinite().all()) for _, x in named_tensors(state)):
            complaints.add(RangeError, "states", "of finite numbers", f"NaN or infinity in {name!r}")
    for name, factors in adapters.items():
        if not isinstance(factors, Mapping) or not all(isinstance(one, str) and _is_pair(pair) for one, pair in factors.items()):
            complaints.add(DtypeError, "adapters", "a mapping of weights to pairs of matrices", f"{described(factors)} in {name!r}")
        elif (odd := next((x for pair in factors.values() for x in pair if not _is_plain(x)), None)) is not None:
            rule = "of dense tensors of floating-point numbers, with data"
            complaints.add(DtypeError, "adapters", rule, f"one of {odd.dtype}, {odd.layout} on {odd.device} in {name!r}")
        elif wrong := next((one for one, pair in factors.items() if not all(_is_finite(x, model) for x in pair)), None):
            complaints.add(RangeError, "adapters", "of finite numbers", f"NaN or infinity for {wrong} in {name!r}")
    complaints.raise_any()


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, Tensor) and x.dim() == 2 for x in pair)


def _is_plain(x: Tensor) -> bool:
    return x.is_floating_point() and x.layout == torch.strided and not x.is_meta


def _is_finite(x: Tensor, model: CausalLM) -> bool:
    """Whether a tensor is finite in the model's dtype."""
    return bool(x.to(model.like(x.device).dtype).isfinite().all())


def with_adapters(model: CausalLM, adapters: Mapping[str, Factors]) -> CausalLM:
    """The model that an engine runs. With adapters, it has modules of its own, which share the weights."""
    return cast("CausalLM", adapted(model, adapters)) if adapters else model


def tunings_of(pool: StatePool, states: Mapping[str, State], adapters: Mapping[str, Factors]) -> dict[str, Tuning]:
    """The tunings by their names."""
    found = {}
    for name, state in states.items():
        row, tensors = pool.memory.new_zeros(pool.memory.shape[1]), [x for _, x in named_tensors(state)]
        for place, x in zip(pool.tensors(row).values(), tensors):
            place.copy_(x[0])
        found[name] = Tuning(name, tensors, row)
    for number, (name, factors) in enumerate(adapters.items()):
        found[name] = Tuning(name, [x for one in sorted(factors) for x in factors[one]], adapter=number, weights=sorted(factors))
    return found


def model_hashes(base: Callable[[], str], tunings: Mapping[str, Tuning]) -> dict[str, str]:
    """The names of tunings by their model hashes; "" is the base model's."""
    known = base()
    return {known: "", **{one.model_hash(known): name for name, one in tunings.items()}}
