"""The sum of the outputs of a head's blocks of key channels, for kernels whose programs take one block."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...gpu.plan import Plan, Sizes

SIZE = 1024
"""Elements of a program."""


@triton.jit
def penstock_sum_blocks(parts, total, count, V: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """total [rows,V] of ``count`` elements from parts [rows,BLOCKS,V], in the order of the blocks."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    at = parts + i // V * (BLOCKS * V) + i % V
    x = tl.load(at, mask=i < count, other=0.0)
    for block in tl.static_range(1, BLOCKS):
        x += tl.load(at + block * V, mask=i < count, other=0.0)
    tl.store(total + i, x.to(total.dtype.element_ty), mask=i < count)


def add(plan: Plan, parts: str, total: str, H: int, V: int, blocks: int) -> None:
    """Add the launch: ``total`` [B,T,H,V] from ``parts`` [B,T,H * blocks,V]."""

    def count(s: Sizes) -> int:
        return s["B"] * s["T"] * H * V

    options: dict[str, Any] = {"V": V, "BLOCKS": blocks, "SIZE": SIZE}
    plan.launch(penstock_sum_blocks, lambda s: -(-count(s) // SIZE), (parts, total), (count,), 4, **options)
