"""What the walks without decays per channel on Hopper share: masks of padding, and where gradients of decays are stored."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.hopper_decays import C
from ....gpu.hopper_tiles import zero_rows_from
from ....gpu.tiles import slot_of


@gluon.jit
def zero_padding(tiles, left, layout: gl.constexpr):
    """Zero the rows of tiles from ``left`` on: they are padding or belong to another sequence."""
    for n in gl.static_range(len(tiles)):
        zero_rows_from(tiles[n], left, layout)


@gluon.jit
def place_of_decays(dg, slot, token, n, end, chunks, H, head, STATIC: gl.constexpr, ZEROS: gl.constexpr):
    """Where a program stores dg: from its first ``token``, of a constant decay from its first ``slot`` on.

    ZEROS: the sequence n, which ends at ``end``, may have slots without a chunk; they get 0.
    """
    if STATIC:
        dg += slot.to(gl.int64) * H + head
        if ZEROS:
            for k in range(chunks, (slot_of(n + 1, end, 0, 0, C, True) - slot).to(gl.int32)):
                gl.store(dg + k * H, 0.0)
    else:
        dg += token * H + head
    return dg


@gluon.jit
def store_decays(dg, d_gate, chunk, i, left, H, STATIC: gl.constexpr):
    """Store dg of a chunk with ``left`` tokens from its begin on, of a constant decay their sum."""
    if STATIC:
        gl.store(dg + chunk.to(gl.int64) * H, gl.sum(d_gate, 0))
    else:
        gl.store(dg + (chunk * C + i).to(gl.int64) * H, d_gate.to(dg.dtype.element_ty), mask=i < left)
