"""The walk over chunks in float32 on Hopper, in Gluon, by the tiles of a chunk, whatever its decays are:

    X = beta o (V - k S)        O = A X + q S        S' = total o S + (B^T)^T X        W = V - k S - (A_k T) X

k, q, B^T, A and A_k T are sums of three bfloat16 tiles in memory, and so are S and X as operands, in registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit(do_not_specialize=["N", "T", "H", "b_b", "b_t", "b_h"])
def penstock_delta_walk_float32_sm90(
    k_tiles, q_tiles, b_tiles, a_tiles, r_tiles, v_tiles, o_tiles, beta, totals, initial_state, output, final_state, errors, chunk_states,
    cu_seqlens, rows, N, T, H, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, INITIAL: gl.constexpr, OUTPUT: gl.constexpr, KEEP: gl.constexpr,
    PACKED: gl.constexpr, PIECE: gl.constexpr, ROWS_GIVEN: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """O = A X + q S, S <- total o S + (B^T)^T X with X = beta o (V - k S), chunk by chunk. W = V - k S - (A_k T) X.

    TMA tiles: the parts [3 C,64] of k, q, B^T, A and A_k T of [slots,H,3 C,...], v and output [C,BV] of tokens [B T,H V]. Reads beta
    [B,T,H] and the initial state [N,H,K,V] by strides, total [slots,H,K]. With OUTPUT writes the output and the final state [N,H,K,V], with
    KEEP W [slots,H,C,V] and the transposed states before chunks [slots,H,V,K]. Program (sequence, head, block of BV value channels). PIECE,
    ROWS_GIVEN, NARROW: see ``scalar_walk.py``.
    """
    gl.static_assert(BV == 64)
