"""Random inputs of functions over sequences with the distributions of real models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..call.declaration import Signature
from ..call.dispatch import Explanation
from ..call.families import Registered, Trial, functions
from ..explain import explain
from ..tokens.dtypes import state_dtype
from ..tokens.shape import Shape


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, by the names that all variants share (RWKV's r is q, its w is g)."""

    variant: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    u: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    """Arguments that only this variant's family has, by name."""
    slots: Tensor | None = None
    """Rows of the states that a decode step updates; None: one for each sequence, in order."""

    @classmethod
    def of(cls, variant: str, tensors: Mapping[str, Tensor]) -> Inputs:
        """The inputs with these tensors by name."""
        named = {name: x for name, x in tensors.items() if name in cls.__annotations__}
        return cls(variant, **named, others={name: x for name, x in tensors.items() if name not in named})

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name, in the order of the variant's arguments."""
        given = {name: self.others.get(name, getattr(self, name, None)) for name in self.signature.axes}
        return {name: x for name, x in given.items() if x is not None}

    @cached_property
    def trained(self) -> dict[str, Tensor]:
        """The tensors that need gradients: all but those that a public function may derive, as RetNet's decays, which are constants."""
        derived = {one.name for one in self.signature.arguments if one.derived}
        return {name: x for name, x in self.tensors.items() if name not in derived}

    @property
    def shape(self) -> Shape:
        """The sizes of the call."""
        B, T, _, K = self.q.shape
        return Shape(B, T, self.v.shape[2], K, self.v.shape[3])

    @cached_property
    def family(self) -> Registered:
        """The family of the variant."""
        return functions()[self.variant]

    @cached_property
    def signature(self) -> Signature:
        """The signature of the variant."""
        return self.family.trials[0].operator.signatures[self.variant]

    @cached_property
    def scale(self) -> float:
        """The default scale of the variant."""
        return self.problem().scale  # type: ignore[no-any-return]

    @cached_property
    def _call(self) -> Callable[..., Any]:
        """The public function with these tensors, by name."""
        public = {one.name: one.public for one in self.signature.arguments}
        return partial(self.family.functions[self.variant], **{public[name]: x for name, x in self.tensors.items()})

    def explained(self) -> Explanation:
        """Which implementation ``impl="auto"`` takes for this call."""
        return explain(self.variant, **self._call.keywords)  # type: ignore[attr-defined]

    def run(self, impl: str) -> Tensor:
        """Call the variant's public function; return its output."""
        return self._call(impl=impl).output  # type: ignore[no-any-return]

    @cached_property
    def _step(self) -> Callable[..., Tensor]:
        step, axes = self.family.step, self.signature.axes
        assert step is not None, f"{self.variant}: its family has no decode steps"
        given = [self.tensors.get(name) for name in axes if name not in ("cu_seqlens", "initial_state")]
        return partial(step, self.variant, *given)

    def step(self, state: Tensor, impl: str) -> Tensor:
        """Call the public function for decode steps, which updates the states in place; return its output."""
        slots = {} if self.slots is None else {"slots": self.slots}
        return self._step(state=state, impl=impl, **slots)

    def _given(self, trial: Trial, more: dict[str, Tensor | None]) -> list[Tensor | None]:
        return [(self.tensors | more).get(name) for name in trial.operator.names]

    def problem(self, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Any:
        """The problem that implementations get for this call."""
        trial = self.family.trials[0]
        tensors = self._given(trial, {"cu_seqlens": cu_seqlens, "initial_state": initial_state})
        return trial.operator.checked(self.variant, tensors, trial.options)

    def in_place(self, pool: Tensor, slots: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Any:
        """The problem that implementations get for an update of rows of a pool by these tokens."""
        trial = next(trial for trial in self.family.trials if trial.operator.in_place)
        function = next(one.function for one in trial.operator.signatures.values() if one.about is self.signature.about)
        tensors = self._given(trial, {"cu_seqlens": cu_seqlens, "slots": slots, "state": pool})
        return trial.operator.checked(function, tensors, trial.options)

    def first(self, tokens: int) -> Inputs:
        """The first tokens of every sequence."""
        axes = self.signature.axes
        return Inputs.of(self.variant, {name: x[:, :tokens] if "T" in axes[name] else x for name, x in self.tensors.items()})

    def with_gradients(self) -> Inputs:
        """A copy whose ``trained`` tensors require gradients."""
        copies = {name: x.detach().clone().requires_grad_(name in self.trained) for name, x in self.tensors.items()}
        return Inputs.of(self.variant, copies)


def inputs(
    variant: str,
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    gates: str = "",
    groups: int | None = None,
    slots: bool = False,
) -> Inputs:
    """Random inputs with the distributions of a model of this variant: q, k, v in ``dtype``, decays and bonus in float32 or float64.

    Decays can be drawn otherwise by ``gates``, one of ``tokens.distributions.GATES`` or ``STRENGTHS``. ``groups``: heads of q and k, if
    heads of v share them. ``slots``: a decode step updates rows of the states in random order.

    >>> inputs("gla", Shape.parse("1,5,2,8")).g.shape
    torch.Size([1, 5, 2, 8])
    """
    family, random = functions()[variant], torch.Generator(torch.device(device)).manual_seed(seed)
    assert family.draw is not None, f"{variant}: its family draws no inputs"
    sizes = shape._asdict() | {"G": groups or shape.H}
    drawn, (first, *others) = family.draw(variant, sizes, random, gates), family.trials[0].operator.signatures[variant].arguments
    alike = {first.name, *(one.name for one in others if one.like)}
    found = Inputs.of(variant, {name: x.to(dtype if name in alike else state_dtype(dtype)) for name, x in drawn.items()})
    return replace(found, slots=torch.randperm(shape.B, generator=random, device=device)) if slots else found
