"""flash-linear-attention (fla) as a peer. It must be installed, and the inputs must be on a GPU."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import ImplementationRefused
from ..verify.inputs import Inputs
from .candidates import Candidate

CHUNKED = {
    "linear_attention": "chunk_linear_attn",
    "retention": "chunk_retention",
    "simple_gla": "chunk_simple_gla",
    "gla": "chunk_gla",
    "rwkv6": "chunk_rwkv6",
}
"""Names of the chunked operators in ``fla.ops``."""
RECURRENT = {variant: name.replace("chunk", "fused_recurrent") for variant, name in CHUNKED.items()}
"""Names of the token-by-token operators: for decoding, and for the peer "fla_recurrent"."""
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


def candidate(recurrent: bool = False) -> Candidate:
    """The chunked operator, or with ``recurrent`` the token-by-token one. Decoding always uses the latter. Refused calls raise."""
    ops = import_module("fla.ops")

    def forward(inputs: Inputs) -> Tensor:
        return _call(ops, RECURRENT if recurrent else CHUNKED, inputs)[0]

    def step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        return _call(ops, RECURRENT, inputs, initial_state=state, output_final_state=True)

    return Candidate("fla_recurrent" if recurrent else "fla", forward, step, lambda inputs, result: BUDGET[inputs])


def _call(ops: ModuleType, names: dict[str, str], inputs: Inputs, **states: Any) -> tuple[Tensor, Tensor]:
    """Call an operator with [B,T,H,*]. Its retention computes its own decay; its linear attention normalises by default."""
    reason = refusal(inputs)
    if reason is not None:
        raise ImplementationRefused(reason)
    function = getattr(ops, names[inputs.variant])
    options: dict[str, Any] = {"scale": inputs.scale, **states}
    if inputs.variant == "linear_attention":
        options["normalize"] = False
    decay = [] if inputs.variant in ("linear_attention", "retention") else [inputs.g]
    bonus = [] if inputs.u is None else [inputs.u]
    output, state = function(inputs.q, inputs.k, inputs.v, *decay, *bonus, **options)
    return output, state
