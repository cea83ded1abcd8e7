"""A call of this library with raw decays: logits in place of log decays, as models of bounded decays pass them.

A raw decay has a bound, so kernels need fewer levels (docs/delta.md). Log decays of ``auto`` have none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import ImplementationRefused
from ..tokens.decays import FASTEST
from ..tokens.distributions import BOUND
from ..verify.inputs import Inputs
from .candidates import Candidate, Mode, ours
from .delta_peers import gate_logits, gradient_of_decays, refusing

NAME = "raw"
BOUNDS = {"kda": BOUND, "rwkv7": FASTEST}
"""The least log decay, by variant."""


def names(variant: str) -> tuple[str, ...]:
    """``raw``, if the variant has raw decays with a bound."""
    return (NAME,) if variant in BOUNDS else ()


def own(name: str, inputs: Inputs, mode: Mode) -> Candidate:
    """The candidate of this library with this name: ``raw``, ``auto`` or an implementation."""
    return candidate(inputs, mode) if name == NAME else ours(name, inputs, mode)


def candidate(inputs: Inputs, mode: Mode) -> Candidate:
    """``auto`` with raw decays. It refuses every call if the log decays are outside the bound, or the call is a decode step.

    Gradients of log decays of 0 cannot be compared: x is infinite.
    """
    bound = BOUNDS[inputs.variant]
    if mode == "decode":
        return refusing(NAME, "decode steps are those of auto, which have no levels")
    try:
        finite = bool(gate_logits(inputs.g, bound).isfinite().all())
    except ImplementationRefused as refusal:
        return refusing(NAME, str(refusal))
    if mode == "fwdbwd" and not finite:
        return refusing(NAME, f"its log decays are {bound:.4g} sigmoid(x), and log decays of 0 have no gradient by x")
    auto, call = ours("auto", inputs, mode), _call(inputs)

    def arguments(x: Inputs) -> Inputs:
        return replace(x, g=gate_logits(x.g, bound).to(x.q.dtype))

    def forward(x: Inputs) -> Tensor:
        return call(x.tensors)  # type: ignore[no-any-return]

    def gradients(x: Inputs, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return gradient_of_decays(x, found, bound)

    name = auto.name.replace("auto", NAME)
    return replace(auto, name=name, forward=forward, arguments=arguments, gradients=gradients)


def _call(inputs: Inputs) -> Callable[[dict[str, Tensor]], Any]:
    """The output of the public function, from tensors by name."""
    public = {one.name: one.public for one in inputs.signature.arguments}
    if inputs.variant == "rwkv7":
        options: dict[str, Any] = {"raw_decay": True}
    else:
        options = {"A_log": torch.zeros(inputs.shape.H, device=inputs.q.device), "lower_bound": BOUND}
    function: Any = partial(inputs.family.functions[inputs.variant], **options)
    return lambda tensors: function(**{public[name]: x for name, x in tensors.items()}).output
