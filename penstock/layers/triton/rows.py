"""Writes states to rows of their pools."""

import triton
import triton.language as tl
from torch import Tensor

from ...call.derivatives import count_write
from ...gpu.launch import on_device_of
from .launch import BLOCK, blocks


@triton.jit
def penstock_write_rows(
    states,  # [N,D], or packed tokens [T,D]
    pool,  # [P,D]
    slots,  # [N]
    ends,  # [N+1]
    states_n, pool_n, D,
    PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pool[slots[n]] = states[n] for slots of at least 0.

    Reads states [N,D], slots [N]. Writes rows of pool [P,D]. Program (sequence n, BLOCK elements). ``states_n`` and ``pool_n`` are strides
    of rows.

    PACKED: the state of sequence n is its last token; an empty sequence writes nothing.
    """
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + n).to(tl.int64)
    source = n
    if PACKED:
        end = tl.load(ends + n + 1).to(tl.int64)
        if tl.load(ends + n).to(tl.int64) == end:
            slot = slot * 0 - 1
        source = end - 1
    if slot >= 0:
        x = tl.load(states + source * states_n + d, d < D)
        tl.store(pool + slot * pool_n + d, x.to(pool.dtype.element_ty), d < D)


def write_rows(states: Tensor, pool: Tensor, slots: Tensor, ends: Tensor | None = None) -> None:
    """Write states [N,...] to rows of a pool [P,...]. Rows of both are contiguous. Negative slots write nothing.

    With ends [N+1], states are those of packed tokens [T,...]: the last one of each sequence is written.
    """
    N, D = slots.shape[0], pool[0].numel()
    if N:
        on_device_of(states, penstock_write_rows)[N, blocks(D, BLOCK)](
            states, pool, slots, slots if ends is None else ends, states.stride(0), pool.stride(0), D, PACKED=ends is not None, BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
    count_write(pool)
