"""The softmax kernels in Gluon for Hopper: which calls they compute, and their launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....gpu.hopper import Tile, no_matrix, other_rows
from ....gpu.plan import Number, Plan, Sizes, chunks
from ...declaration import Attention
from ..calls import Call, gradients, numbers, results

ROWS = 64
"""Rows per group of four warps."""
REGISTERS = 65536
"""Registers per multiprocessor."""
Numbers = tuple[Number, ...]


class Shape(NamedTuple):
    """Configuration of a kernel: groups of four warps with 64 rows each, rows of a streamed tile, and tiles of the ring buffer."""

    groups: int
    tile: int
    stages: int
    programs: int = 1
    """Programs per multiprocessor."""

    @property
    def registers(self) -> int:
        """Registers per thread of the computing warps, after the loading warps (counted as four) have released all but 24 of theirs."""
        return (REGISTERS // self.programs - 24 * 128) // (self.groups * 128) // 8 * 8

    @property
    def registers_before(self) -> int:
        """Registers per thread at the start."""
        return REGISTERS // self.programs // ((self.groups + 1) * 128) // 8 * 8


FORWARD = {64: Shape(1, 64, 2, 3), 128: Shape(2, 128, 2), 256: Shape(2, 64, 2)}
BY_QUERIES = {64: Shape(1, 64, 2, 3), 128: Shape(2, 64, 2)}
BY_KEYS = {64: Shape(1, 64, 2, 2), 128: Shape(2, 64, 2)}
"""Configurations by D."""
L2 = 50 << 20
"""Bytes of the L2 cache."""


def refuses(call: Call, sizes: dict[int, Shape]) -> str | None:
    """Why the kernels of heads of these ``sizes`` cannot compute a call, or None."""
    a, s, c = call.p, call.p.sizes, call.p.counts
    if a.q.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, this is {a.q.dtype}"
    if s["D"] not in sizes:
        return f"D must be {' or '.join(map(str, sizes))}, this is {s['D']}"
    if a.scale < torch.finfo(torch.float32).tiny:
        return f"scale must be positive, this is {a.scale}"
    if (why := other_rows(c["B"] * c["Tq"], c["B"] * c["Tk"])) is not None:
        return why
    for name, x in (("q", a.q), ("k", a.k), ("v", a.v), ("the output's gradient", call.d_output)):
        if (why := no_matrix(name, x)) is not None:
            return why
    return None


def refuses_forward(call: Call) -> str | None:
    """Heads, layouts and scale."""
    return refuses(call, FORWARD)


def refuses_backward(call: Call) -> str | None:
    """Heads, layouts and scale."""
    return refuses(call, BY_KEYS)


def _launch(
    plan: Plan, kernel: Any, shape: Shape, a: Attention, tensors: tuple[str, ...], tiles: str, given: Numbers, numbers: Numbers,
    **constants: Any,
) -> None:  # fmt: skip
    """Plan a kernel, by keys if its first tensor is k. ``tiles``: for each tiled tensor, "r" for resident rows or "w" for streamed ones."""
    s, packed, by_keys = a.sizes, a.cu_seqlens is not None, tensors[0] == "k"
    each, size = s["H"] // s["G"], a.q.element_size()
    axis, heads, same = ("Tk", s["G"], 1) if by_keys else ("Tq", s["H"], each)

    def together(s: Sizes) -> int:
        walked = s["Tq"] * each if by_keys else s["Tk"]
        bytes_walked = 2 * size * walked * s["D"]  # by ``same`` heads
        return min(max(1, L2 // 2 // bytes_walked) * same, heads if packed else s["N"] * heads)

    plan.launch(
        kernel, lambda s: chunks(s[axis], shape.groups * ROWS, s["N"], packed) * heads, (*tensors, "cu_seqlens", "cu_seqlens_k"),
        (*given, together, *numbers), 4,
        tuple(Tile(ROWS if kind == "r" else shape.tile, s["D"]) for kind in tiles), shape.registers_before,
        H=s["H"], G=s["G"], D=s["D"], CAUSAL=a.causal, WINDOW=a.window is not None, PACKED=packed,
        GROUPS=shape.groups, STAGES=shape.stages, REGISTERS=shape.registers, **constants,
    )  # fmt: skip


def forward(call: Call) -> Plan:
    """Plan the forward pass."""
    from . import forward

    plan, a, shape = Plan(), call.p, FORWARD[call.p.sizes["D"]]
    output, lse = results(plan, a)
    tensors = ("q", "k", "v", output, output, lse)
    _launch(plan, forward.penstock_attention_fwd_sm90, shape, a, tensors, "rwwr", numbers(a), (), BN=shape.tile)
    return plan


def backward(call: Call) -> Plan:
    """Plan the backward pass."""
    from . import backward

    plan, a, d_lse = Plan(), call.p, call.d_lse
    dq, dk, dv = gradients(plan, a)
    by_queries, by_keys, tokens, given = BY_QUERIES[a.sizes["D"]], BY_KEYS[a.sizes["D"]], lambda s: s["B"] * s["Tq"], numbers(a)
    rows = plan.empty("rows", 2, a.sizes["H"], tokens)
    some = d_lse is not None
    _launch(
        plan, backward.penstock_attention_bwd_dq_sm90, by_queries, a,
        ("q", "d_output", "k", "v", dq, dq, "output", "lse", "d_lse" if some else "q", rows), "rrwwr", given,
        (tokens, *(d_lse.stride() if d_lse is not None else (0, 0, 0))), BN=by_queries.tile, D_LSE=some,
    )  # fmt: skip
    _launch(
        plan, backward.penstock_attention_bwd_dkdv_sm90, by_keys, a,
        ("k", "v", "q", "d_output", dk, dv, dk, dv, rows), "rrwwrr", given, (tokens,), BM=by_keys.tile,
    )  # fmt: skip
    return plan
