"""The sum of two parts of a gradient, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK = gl.constexpr(1024)


@gluon.jit(do_not_specialize=["count"])
def penstock_sum_parts(parts, found, count):
    """found [count] = parts[0] + parts[1], of parts [2,count]. Program: BLOCK elements."""
    i = gl.program_id(0).to(gl.int64) * BLOCK + gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
    x = gl.load(parts + i, mask=i < count, other=0.0) + gl.load(parts + count.to(gl.int64) + i, mask=i < count, other=0.0)
    gl.store(found + i, x.to(found.dtype.element_ty), mask=i < count)
