"""Softmax attention over pages of keys and values.

The keys of a sequence are cut into splits of SPLIT positions. A split has its own running maximum m, denominator l and unnormalised output
acc, in log2 units, and splits are merged in order::

    m' = max(m, m_s)    l' = 2^(m - m') l + 2^(m_s - m') l_s    acc' = 2^(m - m') acc + 2^(m_s - m') acc_s

A program merges all splits of its queries, or computes one of them and ``penstock_paged_attention_merge`` merges. Both have the same bits:
the same operations in the same order, with explicit fused multiplications and additions. Splits and tiles without visible keys change no
bit. So a result is a function of the position, q, and the keys and values of the sequence alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....gpu.tiles import span_of, tile
from .tiles import dot


@triton.jit
def merged(m, l, acc, m_s, l_s, acc_s):
    """The merge of two splits: m, l [M], acc [M,D]."""
    highest = tl.maximum(m, m_s)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    rest = tl.exp2(m - base)
    p = tl.exp2(m_s - base)
    return highest, tl.fma(l, rest, l_s * p), tl.fma(acc, tl.broadcast_to(rest[:, None], acc.shape), acc_s * p[:, None])


@triton.jit
def split_of(
    Q, keys, values, row_pages, g, low, high, last, place, c, window, page_k, page_v, PAGE: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """m, l and acc of queries Q over the keys from ``low`` to ``high``, multiples of BN. Keys after ``last`` are not read."""
    d = tl.arange(0, BD)
    n = tl.arange(0, BN)
    m = tl.full((Q.shape[0],), float("-inf"), tl.float32)
    l = tl.zeros((Q.shape[0],), tl.float32)
    acc = tl.zeros((Q.shape[0], BD), tl.float32)
    for at in tl.range(low, high, BN, num_stages=STAGES):
        page = tl.load(row_pages + at // PAGE).to(tl.int64)
        j = at + n
        within = (at % PAGE * G + g) * D
        K = tile(keys + page * page_k + within, n, j <= last, G * D, d, 1, D, BD)
        s = dot(Q, tl.trans(K), tl.zeros((Q.shape[0], BN), tl.float32), PRECISION) * c
        seen = j[None, :] <= place[:, None]
        if WINDOW:
            seen = seen & (j[None, :] > place[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
        highest = tl.maximum(m, tl.max(s, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(s - base[:, None])
        rest = tl.exp2(m - base)
        V = tile(values + page * page_v + within, n, j <= last, G * D, d, 1, D, BD)
        acc = dot(p.to(V.dtype), V, acc * rest[:, None], PRECISION)
        l = tl.fma(l, rest, tl.sum(p, 1))
        m = highest
    return m, l, acc


@triton.jit(do_not_specialize=["N", "T", "S", "window", "whole"])
def penstock_paged_attention(
    q,  # [R,H,D]
    keys, values,  # [P,PAGE,G,D]
    pages,  # [rows,M]
    positions,  # [R]
    slots,  # [N]
    cu_seqlens,  # [N+1]
    sums,  # [R,H,S,2]
    outputs,  # [R,H,S,D]
    c, window, N, T, S, whole, q_r, page_k, page_v, pages_n,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """m = max(s), l = sum(2^(s - m)) and acc = sum(2^(s - m) v) of splits of the keys, s = c q k^T.

    Reads q [R,H,D], pages of keys and values [P,PAGE,G,D], and the positions of tokens [R]. Writes sums [R,H,S,2] and outputs [R,H,S,D].
    Program (BM / BR tokens of a sequence, BR of the heads of q of a head of k; a split), with ``whole`` all splits, which are merged into
    the first one. Row slots[n] of ``pages`` has the pages of sequence n; negative slots are skipped. A unit of ``c`` is scale log2(e).
    """
    HEADS: tl.constexpr = H // G
    L: tl.constexpr = BM // BR
    blocks: tl.constexpr = (HEADS + BR - 1) // BR
    pid = tl.program_id(0)
    block = pid % blocks
    g = pid // blocks % G
    n, begin, end, done = span_of(pid // (blocks * G), cu_seqlens, N, T, L, PACKED)
    if done >= end - begin:
        return
    row = n.to(tl.int64)
    if SLOTS:
        row = tl.load(slots + n).to(tl.int64)
        if row < 0:
            return
    start = begin + done
    if not PACKED:
        start = n.to(tl.int64) * T + done
    i = tl.arange(0, BM)
    token = i // BR
    h = block * BR + i % BR
    live = (token < end - begin - done) & (h < HEADS)
    h = g * HEADS + h
    first = tl.load(positions + start).to(tl.int32)
    last = first + tl.minimum(end - begin - done, L).to(tl.int32) - 1
    place = first + token
    low = first * 0
    if WINDOW:
        low = tl.maximum(first - window + 1, 0)
    part = low // SPLIT
    stop = last // SPLIT + 1
    if whole == 0:
        part = part * 0 + tl.program_id(1)
        if (part < low // SPLIT) | (part >= stop):
            return
        stop = part + 1
    slot = part * (1 - whole)
    d = tl.arange(0, BD)
    mask = live[:, None]
    if D != BD:
        mask = mask & (d < D)[None, :]
    Q = tl.load(q + (start + token[:, None]) * q_r + h[:, None] * D + d[None, :], mask=mask, other=0.0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    for s in tl.range(part, stop):
        at = tl.maximum(s * SPLIT, low // BN * BN)
        m_s, l_s, acc_s = split_of(
            Q, keys, values, pages + row * pages_n, g, at, tl.minimum((s + 1) * SPLIT, last + 1), last, place, c, window, page_k, page_v,
            PAGE, G, D, BD, BN, WINDOW, PRECISION, STAGES,
        )  # fmt: skip
        m, l, acc = merged(m, l, acc, m_s, l_s, acc_s)
    where = ((start + token) * H + h) * S + slot
    tl.store(sums + where * 2, m, mask=live)
    tl.store(sums + where * 2 + 1, l, mask=live)
    tl.store(outputs + where[:, None] * D + d[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["S", "window", "whole"])
def penstock_paged_attention_merge(
    sums,  # [R,H,S,2]
    outputs,  # [R,H,S,D]
    positions,  # [R]
    output,  # [R,H,D]
    window, S, whole,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """o = acc / l of the merged splits.

    Reads sums [R,H,S,2], outputs [R,H,S,D], positions [R]. Writes output [R,H,D]. Program (token, BH heads).
    """
    r = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)
    mask = (h < H)[:, None] & (d < D)[None, :]
    place = tl.load(positions + r).to(tl.int32)
    stop = tl.where(whole == 0, tl.minimum(place // SPLIT + 1, S), 1)
    part = place * 0
    if WINDOW:  # Triton 3.4 does not compile a loop whose begin is assigned inside of ``if whole == 0``
        part = tl.where(whole == 0, tl.maximum(place - window + 1, 0) // SPLIT, 0)
    m = tl.full((BH,), float("-inf"), tl.float32)
    l = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, BD), tl.float32)
    for s in tl.range(part, stop):
        where = (r * H + h) * S + s
        m_s = tl.load(sums + where * 2, mask=h < H, other=float("-inf"))
        l_s = tl.load(sums + where * 2 + 1, mask=h < H, other=0.0)
        acc_s = tl.load(outputs + where[:, None] * D + d[None, :], mask=mask, other=0.0)
        m, l, acc = merged(m, l, acc, m_s, l_s, acc_s)
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(output + (r * H + h[:, None]) * D + d[None, :], acc.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def penstock_paged_store(
    k, v,  # [R,W]
    keys, values,  # [P,PAGE,W]
    pages,  # [rows,M]
    slots,  # [N]
    owners,  # [R]
    positions,  # [R]
    T, M, k_r, v_r, page_k, page_v, pages_n,
    W: tl.constexpr, PAGE: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """keys[page, place] = k, values[page, place] = v.

    Reads k, v [R,W], positions [R]. Writes rows of keys and values [P,PAGE,W]. Program (token, BLOCK elements). Negative slots write
    nothing.
    """
    r = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = r // T
    if PACKED:
        n = tl.load(owners + r).to(tl.int64)
    if SLOTS:
        n = tl.load(slots + n).to(tl.int64)
    place = tl.load(positions + r).to(tl.int64)
    if (n >= 0) & (place < M * PAGE):
        page = tl.load(pages + n * pages_n + place // PAGE).to(tl.int64)
        at = place % PAGE * W + w
        tl.store(keys + page * page_k + at, tl.load(k + r * k_r + w, w < W).to(keys.dtype.element_ty), w < W)
        tl.store(values + page * page_v + at, tl.load(v + r * v_r + w, w < W).to(values.dtype.element_ty), w < W)
