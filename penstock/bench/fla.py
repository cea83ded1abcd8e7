"""flash-linear-attention (fla) as a peer. It must be installed, and the inputs must be on a GPU."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import ImplementationRefused
from ..tokens.decays import FASTEST
from ..tokens.distributions import BOUND
from ..verify.inputs import Inputs
from .candidates import Candidate, gathered

CHUNKED = {
    "linear_attention": "chunk_linear_attn",
    "retention": "chunk_retention",
    "simple_gla": "chunk_simple_gla",
    "gla": "chunk_gla",
    "rwkv6": "chunk_rwkv6",
    "delta_rule": "chunk_delta_rule",
    "gated_delta_rule": "chunk_gated_delta_rule",
    "kda": "chunk_kda",
    "rwkv7": "chunk_rwkv7",
    "dplr": "chunk_dplr_delta_rule",
}
"""Names of the chunked operators in ``fla.ops``."""
RECURRENT = {variant: name.replace("chunk", "fused_recurrent") for variant, name in CHUNKED.items()}
"""Names of the token-by-token operators: for decoding, and for the peer "fla_recurrent"."""
BOUNDED: dict[str, dict[str, Any]] = {"kda": {"safe_gate": True}, "rwkv7": {"lower_bound": FASTEST}}
"""Options of kernels that take bounded log decays only: of KDA from -5, of RWKV-7 from its own bound."""
PUBLIC = {"rwkv7": {"q": "r", "g": "w"}, "dplr": {"g": "gk"}}
"""fla's names of arguments, where they are not those of this library's kernels."""
BUDGET = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 5e-3, torch.float64: 5e-3}
"""Allowed error by dtype of the inputs: fla multiplies in bfloat16, float16 or TF32."""


def unavailable(device: torch.device) -> str | None:
    """Why fla cannot be timed at all on this device, or None."""
    if find_spec("fla") is None:
        return "it is not installed (pip install flash-linear-attention)"
    if device.type != "cuda":
        return f"it needs a GPU and the inputs are on {device}"
    return None


def refusal(inputs: Inputs) -> str | None:
    """Why fla does not take these inputs, or None. Other calls may still raise."""
    if inputs.variant not in CHUNKED:
        return f"it has no operator for {inputs.variant}"
    if inputs.variant == "linear_attention" and 1 < inputs.q.shape[1] < inputs.q.shape[2]:
        return "its linear attention refuses fewer tokens than heads"
    return None


def candidate(recurrent: bool = False, bounded: bool = False) -> Candidate:
    """The chunked operator, or with ``recurrent`` the token-by-token one. Decoding always uses the latter. Refused calls raise.

    ``bounded``: the chunked operator for bounded log decays.
    """
    os.environ["FLA_FLASH_QLA"] = "0"  # FlashQLA is a peer of its own
    ops = import_module("fla.ops")

    def arguments(inputs: Inputs) -> Inputs:
        if bounded:
            if inputs.variant not in BOUNDED:
                raise ImplementationRefused(f"it has no bounded kernels for {inputs.variant}")
            if inputs.variant == "kda" and inputs.g is not None and not bool((inputs.g >= BOUND).all()):
                raise ImplementationRefused(f"its bounded kernels take log decays from {BOUND:g}")
        return inputs

    def forward(inputs: Inputs) -> Tensor:
        return _call(ops, RECURRENT if recurrent else CHUNKED, inputs, **(BOUNDED[inputs.variant] if bounded else {}))[0]

    def step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        if inputs.variant == "kda" and inputs.slots is not None:  # its other operators have no slots
            function = import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
            output, state = function(**inputs.tensors, scale=inputs.scale, initial_state=state, ssm_state_indices=inputs.slots)
            return output, state
        return in_order(inputs, state)

    @gathered
    def in_order(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        return _call(ops, RECURRENT, inputs, initial_state=state, output_final_state=True)

    name = "fla_bounded" if bounded else "fla_recurrent" if recurrent else "fla"
    return Candidate(name, forward, step, lambda inputs, result: BUDGET[inputs], arguments=arguments)


def _call(ops: ModuleType, names: dict[str, str], inputs: Inputs, **more: Any) -> tuple[Tensor, Tensor]:
    """Call an operator with [B,T,H,*]. Its retention computes its own decay; its linear attention normalises by default."""
    reason = refusal(inputs)
    if reason is not None:
        raise ImplementationRefused(reason)
    function = getattr(ops, names[inputs.variant])
    options: dict[str, Any] = {"scale": inputs.scale, **more}
    if inputs.family.name == "delta":
        public = PUBLIC.get(inputs.variant, {})
        output, state = function(**{public.get(name, name): x for name, x in inputs.tensors.items()}, **options)
        return output, state
    if inputs.variant == "linear_attention":
        options["normalize"] = False
    decay = [] if inputs.variant in ("linear_attention", "retention") else [inputs.g]
    bonus = [] if inputs.u is None else [inputs.u]
    output, state = function(inputs.q, inputs.k, inputs.v, *decay, *bonus, **options)
    return output, state
