"""The plain kernels: every size and layout, on every GPU."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....gpu.plan import Plan, chunks, strides
from ....gpu.target import Target, power, tensor_memory
from ....gpu.target import precision as precision_of
from ...declaration import Attention
from ..calls import Call, gradients, numbers, queries, results
from . import backward as backward_kernels
from . import forward as forward_kernels

KERNELS = {
    "forward": forward_kernels.penstock_attention_fwd,
    "by_keys": backward_kernels.penstock_attention_bwd_dkdv,
    "by_queries": backward_kernels.penstock_attention_bwd_dq,
}
ROWS = 32
"""Rows per program of ``deltas``."""


class KernelConfig(NamedTuple):
    """Queries and keys of a tile, warps, and pipeline stages."""

    BM: int
    BN: int
    warps: int
    stages: int


def config(kernel: str, D: int, size: int, target: Target) -> KernelConfig:
    """The configuration for heads of D (a power of two) elements of ``size`` bytes that fits into the GPU's shared memory."""
    if target.interpreted:
        return KernelConfig(64, 64, 4, 1)
    found = _half(kernel, D, target.arch == "sm_90") if size == 2 else _whole(kernel, D)
    if kernel == "by_keys" and D > 128 and tensor_memory(target):  # dk and dv of 64 keys have all columns of it
        found = found._replace(BN=min(found.BN, 32))
    while shared_bytes(kernel, found, D, size) > target.shared_memory and (found.stages > 1 or max(found.BM, found.BN) > 16):
        if found.stages > 1:
            found = found._replace(stages=found.stages - 1)
        else:
            found = found._replace(**({"BM": found.BM // 2} if found.BM >= found.BN else {"BN": found.BN // 2}))
    return found


def _half(kernel: str, D: int, measured: bool) -> KernelConfig:
    """The configuration for 16-bit inputs: ``measured`` on an sm_90 for heads of 64 and 128, else the largest that hardly spills.

    Bytes of spills on sm_80 at D = 128, with the measured tiles and with those of 64 by 64: by_keys 880, 0; by_queries 360, 0.
    """
    if kernel == "forward":
        if D <= 64:
            return KernelConfig(64, 64, 4, 3)
        return KernelConfig(128, 128, 8, 3) if D <= 128 and measured else KernelConfig(128, 64, 8, 3 if D <= 128 else 2)
    if kernel == "by_keys":
        return (
            KernelConfig(32, 64, 4, 2)
            if D <= 64
            else KernelConfig(64, 128, 8, 3)
            if D <= 128 and measured
            else KernelConfig(64, 64, 8, 2)
            if D <= 128
            else KernelConfig(32, 64, 8, 1)
        )
    if D <= 64:
        return KernelConfig(64, 64, 4, 3)
    return KernelConfig(128, 64, 8, 3) if D <= 128 and measured else KernelConfig(64, 64, 8, 2) if D <= 128 else KernelConfig(64, 32, 8, 2)


def _whole(kernel: str, D: int) -> KernelConfig:
    """The configuration for float32: a product is three TF32 products, so tiles are small. Chosen by free registers on an sm_90."""
    if D <= 64:
        return KernelConfig(32, 32, 4, 2) if kernel == "by_keys" else KernelConfig(64, 32, 4, 1)
    return KernelConfig(32, 32, 8, 1) if D <= 128 else KernelConfig(16, 16, 4, 1)


def shared_bytes(kernel: str, b: KernelConfig, D: int, size: int) -> int:
    """An upper bound of a program's shared memory: resident tiles, pipelined tiles, and p (and ds) as results and as operands.

    At least the compiled size of every configuration (bench/resources.json).
    """
    stays = {"forward": b.BM, "by_keys": 2 * b.BN, "by_queries": 2 * b.BM}[kernel]
    moves = b.BM if kernel == "by_keys" else b.BN
    weights = 2 if kernel == "forward" else 4
    # q in both layouts; 16-bit tiles are transposed when loaded to registers, except for few keys (sm_86: 32 for D = 256)
    turned = moves * (kernel == "by_keys" and (size == 4 or b.BN <= 32))
    return size * (D * (stays + 2 * moves * b.stages + turned) + weights * b.BM * b.BN) + 2048  # barriers, exponents


def precision(dtype: torch.dtype, target: Target) -> str:
    """The precision of products: 16-bit operands as they are ("half"), float32 as in the kernels of the recurrence."""
    if dtype != torch.float32:
        return "ieee" if target.interpreted else "half"
    return precision_of(dtype, target)


def _call(a: Attention, target: Target) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Constants of all launches of a call, and their numbers before the strides."""
    s = a.sizes
    constants = {
        "H": s["H"], "G": s["G"], "D": s["D"], "BD": power(s["D"]), "CAUSAL": a.causal, "WINDOW": a.window is not None,
        "PACKED": a.cu_seqlens is not None, "PRECISION": precision(a.q.dtype, target),
    }  # fmt: skip
    return constants, numbers(a)


def _launch(plan: Plan, kernel: str, a: Attention, target: Target, tensors: tuple[str, ...], others: tuple[Tensor, ...] = ()) -> None:
    constants, given = _call(a, target)
    s, b = a.sizes, config(kernel, constants["BD"], a.q.element_size(), target)
    axis, L, heads = ("Tk", b.BN, s["G"]) if kernel == "by_keys" else ("Tq", b.BM, s["H"])
    packed = a.cu_seqlens is not None
    plan.launch(
        KERNELS[kernel], lambda s: chunks(s[axis], L, s["N"], packed) * heads, (*tensors, "cu_seqlens", "cu_seqlens_k"),
        (*given, *strides(a.q, a.k, a.v, *others)), b.warps, **constants, BM=b.BM, BN=b.BN, STAGES=b.stages,
    )  # fmt: skip


def forward(call: Call) -> Plan:
    """``output`` and ``lse``."""
    plan = Plan()
    output, lse = results(plan, call.p)
    _launch(plan, "forward", call.p, call.target, ("q", "k", "v", output, lse))
    return plan


def backward(call: Call) -> Plan:
    """``dq``, ``dk`` and ``dv`` from what the forward pass returned and its gradients."""
    plan, a, d_output, d_lse = Plan(), call.p, call.upstream, call.d_lse
    dq, dk, dv = gradients(plan, a)
    H, D = a.sizes["H"], a.sizes["D"]
    delta = plan.empty("delta", *queries(a))
    plan.launch(
        backward_kernels.penstock_attention_delta, lambda s: math.ceil(s["B"] * s["Tq"] * H / ROWS),
        ("output", "d_output", "lse", "d_lse" if d_lse is not None else "q", delta),
        (lambda s: s["B"] * s["Tq"] * H, queries(a)[1], *d_output.stride(), *(d_lse.stride() if d_lse is not None else (0, 0, 0))), 4,
        H=H, D=D, BD=power(D), BM=ROWS, D_LSE=d_lse is not None,
    )  # fmt: skip
    _launch(plan, "by_keys", a, call.target, ("q", "k", "v", "d_output", "lse", delta, dk, dv), (d_output,))
    _launch(plan, "by_queries", a, call.target, ("q", "k", "v", "d_output", "lse", delta, dq), (d_output,))
    return plan
