"""The sum of the outputs of a head's blocks of key channels, for kernels whose programs take one block."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ....gpu.plan import Plan, Sizes

SIZE = 1024
"""Elements of a program."""


@triton.jit(do_not_specialize=["rows"])
def penstock_sum_blocks(parts, total, rows, V: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """total = sum_b parts_b, in the order of the blocks.

    Reads parts [rows,BLOCKS,V], writes total [rows,V]. A program has SIZE elements. Their number may not fit 32 bits.
    """
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    at = parts + i // V * (BLOCKS * V) + i % V
    x = tl.load(at, mask=i // V < rows, other=0.0)
    for block in tl.static_range(1, BLOCKS):
        x += tl.load(at + block * V, mask=i // V < rows, other=0.0)
    tl.store(total + i, x.to(total.dtype.element_ty), mask=i // V < rows)


def add(plan: Plan, parts: str, total: str, H: int, V: int, blocks: int) -> None:
    """Add the launch: ``total`` [B,T,H,V] from ``parts`` [B,T,H * blocks,V]."""

    def rows(s: Sizes) -> int:
        return s["B"] * s["T"] * H

    options: dict[str, Any] = {"V": V, "BLOCKS": blocks, "SIZE": SIZE}
    plan.launch(penstock_sum_blocks, lambda s: -(-rows(s) * V // SIZE), (parts, total), (rows,), 4, **options)
