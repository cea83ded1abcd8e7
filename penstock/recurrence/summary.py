"""What a run of tokens does to a state: the sum that it adds and the decay by which it multiplies. In plain PyTorch, on any device.

Forward in time, tokens 0 to T-1 turn a state S into::

    exp(D) o S + Z,     D = sum_t g_t,     Z = sum_t (k_t o exp(sum_{s>t} g_s))^T v_t

The adjoint turns the gradient dS of the state after the tokens into that of the state before them. With k = q and v = dO::

    exp(D) o dS + Z,    Z = scale sum_t (q_t o exp(sum_{s<=t} g_s))^T dO_t      ["previous": s<t]

Tokens are cut into chunks. The factors in a chunk are exponentials of its own sums; the state is carried from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call.implementation import Implementation
from ..tokens.chunks import beyond, through
from ..tokens.dtypes import state_dtype
from ..tokens.pieces import CHUNK
from .declaration import Summary

BLOCK = 64
"""Chunks whose sums are computed together."""


def exact(problem: Summary) -> tuple[Tensor, Tensor]:
    """State and decay in float64, one token after another: the oracle."""
    problem = problem.forward_in_time()
    x, y = problem.k.double(), problem.v.double() * problem.scale
    g = None if problem.gate is None else problem.gate.double().expand(x.shape)
    S = x.new_zeros(problem.state_shape) if problem.initial_state is None else problem.initial_state.double()
    total = x.new_zeros(problem.state_shape[:3])
    tokens = range(x.shape[1])
    for t in reversed(tokens) if problem.adjoint else tokens:
        made = x[:, t, :, :, None] * y[:, t, :, None, :]
        if g is None:
            S = S + made
        else:
            kept = g[:, t].exp()[..., None]
            S = kept * (S + made) if problem.adjoint and problem.variant.read == "updated" else kept * S + made
            total = total + g[:, t]
    return S * 1, total * 1


def forward(problem: Summary, operand: Callable[[Tensor], Tensor] = lambda x: x) -> tuple[Tensor, Tensor]:
    """State and decay, chunk by chunk. All operations are differentiable. ``operand`` rounds operands of products."""
    problem = problem.forward_in_time()
    dtype = state_dtype(problem.k.dtype)
    S = problem.k.new_zeros(problem.state_shape, dtype=dtype) if problem.initial_state is None else problem.initial_state.to(dtype)
    total = S.new_zeros(S.shape[:3], dtype=torch.float64)
    T, gate = problem.k.shape[1], problem.gate
    if gate is not None:
        gate = gate.to(dtype).expand(*problem.k.shape[:3], gate.shape[3])
    begins = range(0, T, CHUNK * BLOCK)
    for begin in reversed(begins) if problem.adjoint else begins:
        part = slice(begin, begin + CHUNK * BLOCK)
        x, y, g = (_rows(t, part, dtype) for t in (problem.k, problem.v, gate))
        assert x is not None
        assert y is not None
        if g is None:
            S = S + (operand(x).mT @ operand(y)).sum(1) * problem.scale
            continue
        between = through(g, problem.variant.read == "updated") if problem.adjoint else beyond(g)
        sums = operand(x * between.exp()).mT @ operand(y) * problem.scale
        decays = g.sum(-2, dtype=torch.float64)  # exp(D) is as exact as D: a float32 sum is off by |D| / 2^24 and more
        kept, order = decays.exp().to(dtype)[..., None], range(sums.shape[1])
        for n in reversed(order) if problem.adjoint else order:
            S = S * kept[:, n] + sums[:, n]
        total = total + decays.sum(1)
    return S * 1, total.to(dtype, copy=True)  # new tensors, as the schema requires


def _rows(x: Tensor | None, part: slice, dtype: torch.dtype) -> Tensor | None:
    """Some tokens of [B,T,H,*] in chunks: [B,chunks,H,C,*], zeros in the padding."""
    if x is None:
        return None
    x = x[:, part].to(dtype)
    left = -x.shape[1] % CHUNK
    rows: Tensor = F.pad(x, (0, 0, 0, 0, 0, left)).unflatten(1, (-1, CHUNK)).transpose(2, 3)
    return rows


def _rounded(problem: Summary) -> tuple[Tensor, Tensor]:
    state, decay = exact(problem)
    dtype = state_dtype(problem.k.dtype)
    return state.to(dtype), decay.to(dtype)


IMPLEMENTATIONS = (
    Implementation("chunkwise", "plain PyTorch, any device", forward),
    Implementation("reference", "float64 token loop, the oracle", _rounded),
)
