"""Progress of programs that exchange tiles through memory, on Hopper, in Gluon: counts that one program releases and others acquire.

Tiles are written and read by the tensor memory accelerator (TMA). A count is released after all its copies are complete in memory, by every
thread of a group of warps after a barrier. It is acquired by every thread before it starts copies of these tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.hopper_tiles import meet


@gluon.jit
def acquired(count):
    """The count at an address."""
    asm: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"
    return gl.inline_asm_elementwise(asm, "=r,l", [count.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_count(count, wanted):
    """Wait until the count at an address is at least ``wanted``. Copies that are started afterwards see what happened before."""
    found = acquired(count)
    while found < wanted:
        found = acquired(count)
    gl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, $1;", "=r,r", [found], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_copies(x):
    """Wait until all copies to memory are complete there. x: any integer."""
    asm: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release_count(count, value):
    """Set the count at an address, after a barrier of the group of warps."""
    meet()
    asm: gl.constexpr = "st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2;"
    gl.inline_asm_elementwise(asm, "=r,l,r", [count.to(gl.int64), value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def penstock_zero_counts(counts, size):
    """counts = 0, ``size`` of them. Program: 1024."""
    i = gl.program_id(0) * 1024 + gl.arange(0, 1024, gl.BlockedLayout([8], [32], [4], [0]))
    gl.store(counts + i, i * 0, mask=i < size)
