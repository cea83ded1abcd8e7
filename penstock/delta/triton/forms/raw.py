"""The stage of raw inputs: one launch computes log decays, beta and normalised q and k, another their gradients.

Each tensor is read and written once: with inputs of 16 bits, 14 bytes for an element of q, k and a gate per channel, 4 of them the decay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....gpu import decays
from ....gpu.plan import Plan, Size, Sizes
from ....gpu.target import power
from ....tokens.gpu_calls import batch, tokens
from ...declaration import DeltaTokens
from ..portable import raw

R = 32
"""Tokens of a program. Not measured."""
INPUTS = ("q", "k", "raw", "beta", "A_log", "dt_bias")
MADE = {"q": "unit_q", "k": "unit_k", "g": "log_decay", "beta": "strength"}
"""Canonical tensors, and the names of the memory in which they are made."""
GATES = {"": 0, "softplus": raw.SOFTPLUS.value, "sigmoid": raw.SIGMOID.value}


def blocks(s: Sizes) -> int:
    """Blocks of tokens."""
    return s["B"] * -(-s["T"] // R)


def _strides(p: DeltaTokens, name: str, rank: int) -> tuple[int, ...]:
    """The strides of a tensor, with zeros for axes that it does not have."""
    x = getattr(p, name)
    steps = () if x is None else x.stride()
    return (*steps, *[0] * (rank - len(steps)))


def parameter_strides(p: DeltaTokens) -> tuple[int, ...]:
    """The strides of A_log and dt_bias."""
    return *_strides(p, "A_log", 1), *_strides(p, "dt_bias", 2)


def _numbers(p: DeltaTokens) -> tuple[Any, ...]:
    """The numbers of both launches: the bound, T, and strides."""
    found = [step for name, rank in (("q", 4), ("k", 4), ("raw", 4), ("beta", 3)) for step in _strides(p, name, rank)]
    return p.lower_bound or 0.0, tokens, *found, *parameter_strides(p)


def constants(p: DeltaTokens) -> dict[str, Any]:
    """What is raw, as constants of kernels."""
    kind = 0 if p.raw is None else raw.BOUNDED.value if p.lower_bound is not None else GATES[p.variant.raw]
    return {
        "UNIT": p.use_qk_l2norm, "LOGITS": p.beta_logits * (2 if p.allow_neg_eigval else 1), "RAW": kind,
        "GATE": (decays.CHANNEL if "K" in p.variant.decay else decays.SCALAR).value, "BIAS": p.dt_bias is not None,
    }  # fmt: skip


def _launch(plan: Plan, p: DeltaTokens, kernel: Any, tensors: tuple[str, ...], constants: dict[str, Any]) -> None:
    G, H, K = (p.sizes[axis] for axis in "GHK")
    plan.launch(
        kernel, lambda s: blocks(s) * max(G, H), (*INPUTS, *tensors), _numbers(p), 4, fused=False,
        G=G, H=H, K=K, BK=power(K), R=R, **constants,
    )  # fmt: skip


def forward_plan(p: DeltaTokens) -> Plan:
    """``unit_q``, ``unit_k``, ``log_decay`` and ``strength``, where they follow from raw inputs."""
    plan, G, H, K = Plan(), *(p.sizes[axis] for axis in "GHK")

    def memory(name: str, *shape: Size, dtype: torch.dtype, needed: bool) -> str:
        return plan.empty(name, batch, tokens, *shape, dtype=dtype) if needed else "q"

    units = [memory(name, G, K, dtype=p.q.dtype, needed=p.use_qk_l2norm) for name in ("unit_q", "unit_k")]
    g = memory("log_decay", H, *[K] * ("K" in p.variant.decay), dtype=torch.float32, needed=p.raw is not None)
    strength = memory("strength", H, dtype=torch.float32, needed=p.beta_logits)
    _launch(plan, p, raw.penstock_delta_raw_fwd, (*units, g, strength), constants(p))
    return plan


def backward_plan(p: DeltaTokens, given: Mapping[str, Tensor | None]) -> Plan:
    """``dq``, ``dk``, ``draw``, ``dbeta``, ``dA_log`` and ``ddt_bias``, from the gradients of what ``forward_plan`` computes.

    ``given``: these by name, None for those that are not there.
    """
    plan, H, K = Plan(), *(p.sizes[axis] for axis in "HK")
    what = constants(p)
    what["UNIT"] = given["d_unit_q"] is not None
    what["LOGITS"] *= given["d_strength"] is not None
    what["RAW"] *= given["d_log_decay"] is not None

    def like(name: str, of: Tensor | None, needed: bool) -> str:
        return plan.empty("d" + name, batch, tokens, *of.shape[2:], dtype=of.dtype) if needed and of is not None else "q"

    units = [like(name, x, what["UNIT"]) for name, x in (("q", p.q), ("k", p.k))]
    gates = like("raw", p.raw, what["RAW"] > 0), like("beta", p.beta, what["LOGITS"] > 0)
    wide = K if p.variant.bias == "HK" else 1
    summed = what["RAW"] > 0 and p.A_log is not None
    rates = plan.empty("rates", blocks, H) if summed else "q"
    biases = plan.empty("biases", blocks, H, wide) if summed and p.dt_bias is not None else "q"
    _launch(plan, p, raw.penstock_delta_raw_bwd, (*given, *units, *gates, rates, biases), what)
    if summed and p.A_log is not None:
        of_rate = plan.empty("dA_log", H, dtype=p.A_log.dtype)
        of_bias = "q" if p.dt_bias is None else plan.empty("ddt_bias", *p.dt_bias.shape, dtype=p.dt_bias.dtype)
        plan.launch(
            raw.penstock_delta_raw_sums, H * -(-wide // R), (rates, biases, of_rate, of_bias), (blocks,), 4,
            H=H, K=wide, BJ=R, R=2 * R, BIAS=p.dt_bias is not None,
        )  # fmt: skip
    return plan
