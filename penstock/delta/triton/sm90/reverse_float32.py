"""The walk backward over chunks in float32 on Hopper, in Gluon, by the tiles of ``walk_float32.py``. With dS' the gradient of the state
after a chunk,

    Z = A^T dO + B^T dS'        Y = beta o Z = dV        dS = total o dS' + q^T dO - k^T Y
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit(do_not_specialize=["N", "T", "H", "b_b", "b_t", "b_h"])
def penstock_delta_reverse_float32_sm90(
    b_tiles, q_tiles, k_tiles, a_tiles, o_tiles, y_tiles, beta, totals, d_final_state, d_values, d_chunk_states, d_initial_state,
    cu_seqlens, N, T, H, b_b, b_t, b_h, s_n, s_h, s_k, s_v,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, FINAL: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Y = beta o (A^T dO + B^T dS'), dS = total o dS' + q^T dO - k^T Y, from the last chunk to the first.

    TMA tiles: the parts [C,64] of B^T, q, k and A of [slots,H,3 C,...], dO and dV [C,BV] of tokens [B T,H V]. Reads beta [B,T,H] and,
    with FINAL, the gradient of the final state [N,H,K,V] by strides, total [slots,H,K]. Writes dV, the transposed dS' of each chunk
    [slots,H,V,K] and the gradient of the initial state [N,H,K,V]. Program (sequence, head, block of BV value channels).
    """
    gl.static_assert(BV == 64)
