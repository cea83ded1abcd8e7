"""Selects the softmax kernels for Hopper, and plans their launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu.hopper import Tile, modules, tiled
from ...gpu.plan import Number, Plan, Sizes, chunks
from ...gpu.target import Target
from ..declaration import Attention

ROWS = 64
"""Rows per group of four warps."""
REGISTERS = 65536
"""Registers per multiprocessor."""
Numbers = tuple[Number, ...]
FAR = 1 << 31
"""The number of rows of a matrix that is copied in tiles is below this: row indices are 32-bit integers."""


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


def kernels() -> tuple[Any, Any] | None:
    """The modules of the kernels, forward and backward, or None."""
    return modules(__package__)


def suits(a: Attention, target: Target, *d_output: Tensor) -> bool:
    """Whether there are kernels for a call, and the hardware can copy its tensors in tiles."""
    s, c = a.sizes, a.counts
    return (
        target.arch == "sm_90"
        and a.q.dtype in (torch.float16, torch.bfloat16)
        and s["D"] in (BY_KEYS if d_output else FORWARD)
        and a.scale >= torch.finfo(torch.float32).tiny
        and 0 < c["B"] * c["Tq"] < FAR
        and 0 < c["B"] * c["Tk"] < FAR
        and all(map(tiled, (a.q, a.k, a.v, *d_output)))
        and kernels() is not None
    )


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


def forward(plan: Plan, a: Attention, given: Numbers, output: str, lse: str) -> None:
    """Plan the forward pass."""
    found, shape = kernels(), FORWARD[a.sizes["D"]]
    assert found is not None
    _launch(plan, found[0].penstock_attention_fwd_hopper, shape, a, ("q", "k", "v", output, output, lse), "rwwr", given, (), BN=shape.tile)


def backward(plan: Plan, a: Attention, given: Numbers, d_lse: Tensor | None, dq: str, dk: str, dv: str) -> None:
    """Plan the backward pass."""
    found, s = kernels(), a.sizes
    assert found is not None
    queries, keys, tokens = BY_QUERIES[s["D"]], BY_KEYS[s["D"]], lambda s: s["B"] * s["Tq"]
    rows = plan.empty("rows", 2, s["H"], tokens)
    some = d_lse is not None
    _launch(
        plan, found[1].penstock_attention_bwd_dq_hopper, queries, a,
        ("q", "d_output", "k", "v", dq, dq, "output", "lse", "d_lse" if some else "q", rows), "rrwwr", given,
        (tokens, *(d_lse.stride() if d_lse is not None else (0, 0, 0))), BN=queries.tile, D_LSE=some,
    )  # fmt: skip
    _launch(
        plan, found[1].penstock_attention_bwd_dkdv_hopper, keys, a,
        ("k", "v", "q", "d_output", dk, dv, dk, dv, rows), "rrwwrr", given, (tokens,), BM=keys.tile,
    )  # fmt: skip
