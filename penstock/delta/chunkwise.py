"""The chunkwise form in plain PyTorch: any device, any dtype, exact for any decay and any beta, differentiable any number of times.

Tokens are cut into chunks, and a state S [K, V] is carried between them. Inside a chunk, with read_t = exp(sum_{u<=t} g_u) (reada without
t's own decay where the removal reads "before" it), rest_s = exp(sum_{u>s} g_u), total = exp(sum g), and the matrices of pairs
(``pairs.py``)::

    T  = (I - diag(beta) Aa_b)^-1           Ap = Aq_b T                              Bt = T^T (b o rest)
    X  = beta o (R + (a o reada) S)         R = v (one stream), Aa_k v (two streams; beta = 1)
    O  = Ap X + (q o read) S [+ Aq_k v]     S' = total o S + Bt^T X [+ (k o rest)^T v]

Values and states never meet T: for repeated keys T X is a chain of differences, whose terms cancel and whose errors do not. Ap and Bt are
solutions of triangular systems, so a row of Ap depends on no later row.

The backward pass of a chunk, given dS'::

    Z  = Ap^T dO + Bt dS'       Y = beta o Z       U = T X       W = R + (a o reada) S + Aa_b U
    dS = total o dS' + (q o read)^T dO + (a o reada)^T Y             dbeta = rowsum(Z o W)
    dv = Y (one stream), Aq_k^T dO + Aa_k^T Y + (k o rest) dS'
    dAq_b = dO U^T    dAa_b = Y U^T    dAq_k = dO v^T    dAa_k = Y v^T
    dg: pairs, and sums of terms with the state on the other side of t

No gradient passes through T. Chunks are computed in blocks; the backward pass recomputes one block at a time from the state before it, so
memory is linear in T.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.implementation import Implementation, Upstream
from ..tokens.chunks import Chunks, beyond, through
from ..tokens.dtypes import state_dtype
from ..tokens.pieces import advance_by
from . import pairs
from .arithmetic import EXACT, Arithmetic
from .declaration import Delta
from .gradients import Gradients
from .inputs import SHARED, prepared


class Parts(NamedTuple):
    """What the chunks of a block need besides states: [R, H, C, *]."""

    inputs: pairs.Inputs
    A: pairs.Pairs
    L: Tensor  # I - diag(beta) Aa_b
    beta: Tensor | None
    v: Tensor
    R: Tensor
    Ap: Tensor
    Bt: Tensor
    read: Tensor | None  # 1 without a decay
    reada: Tensor | None
    rest: Tensor | None
    total: Tensor | None  # [R, H, K or 1, 1]


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _parts(
    after: bool, by: Arithmetic, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None,
    a: Tensor | None = None, b: Tensor | None = None,
) -> Parts:  # fmt: skip
    """From tensors [R, H, C, *]."""
    two = a is not None and b is not None
    inputs = pairs.Inputs(q, a if a is not None else -k, (b, k) if two else (k,), g, after, by)  # type: ignore[arg-type]
    A = pairs.forward(inputs)
    L = torch.eye(q.shape[-2], dtype=q.dtype, device=q.device) - _times(A.a[0], beta)
    read = reada = rest = total = None
    if g is not None:
        read, rest, total = through(g, own=True).exp(), beyond(g).exp(), g.sum(-2).exp()[..., None]
        reada = read if after else through(g, own=False).exp()
    Ap, Bt = by.right(L, A.q[0]), by.transposed(L, _times(inputs.columns[0], rest))
    return Parts(inputs, A, L, beta, v, by.product(A.a[1], v) if two else v, Ap, Bt, read, reada, rest, total)


class Walk(NamedTuple):
    """The states of a block, by step."""

    before: list[Tensor]
    after: Tensor
    X: list[Tensor]


def _walk(p: Parts, alive: list[int], S: Tensor) -> Walk:
    """The states before each step of a block and after it, from S [lanes, H, K, V]. Lanes that have ended keep theirs."""
    product, none = p.inputs.by.product, [None] * len(alive)
    a, R, Bt = (x.split(alive) for x in (_times(p.inputs.a, p.reada), p.R, p.Bt))
    beta, total = (none if x is None else x.split(alive) for x in (p.beta, p.total))
    columns, written = p.inputs.columns, list[Tensor | None](none)
    if len(columns) == 2:
        written = list(product(_times(columns[1], p.rest).mT, p.v).split(alive))
    before, done, of_steps = [], [], []
    for n in range(len(alive)):
        if alive[n] < S.shape[0]:
            S, ended = S.split([alive[n], S.shape[0] - alive[n]])
            done.append(ended)
        before.append(S)
        X = _times(R[n] + product(a[n], S), beta[n])
        of_steps.append(X)
        S = _times(S, total[n]) + product(Bt[n].mT, X)
        more = written[n]
        if more is not None:
            S = S + more
    return Walk(before, torch.cat([S, *reversed(done)]) if done else S, of_steps)


def _block(after: bool, by: Arithmetic, alive: list[int], S: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs of a block before ``scale``, and the states after it."""
    p = _parts(after, by, **rows)
    walk = _walk(p, alive, S)
    o = by.product(p.Ap, torch.cat(walk.X)) + by.product(_times(p.inputs.q, p.read), torch.cat(walk.before))
    return o + by.product(p.A.q[1], p.v) if len(p.A.q) == 2 else o, walk.after


def _gradients_of_states(p: Parts, alive: list[int], dS: Tensor, d_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Z and dS' of all rows, and the gradient of the states before the block."""
    q, a, product = _times(p.inputs.q, p.read), _times(p.inputs.a, p.reada), p.inputs.by.product
    local, none = product(p.Ap.mT, d_o), [None] * len(alive)
    added, locals_, Bt, a_ = (product(q.mT, d_o).split(alive), local.split(alive), p.Bt.split(alive), a.split(alive))
    beta, total = (none if x is None else x.split(alive) for x in (p.beta, p.total))
    Z, after = [], []
    for n in reversed(range(len(alive))):
        dS_, ended = dS.split([alive[n], dS.shape[0] - alive[n]])
        Z.append(locals_[n] + product(Bt[n], dS_))
        after.append(dS_)
        dS_ = _times(dS_, total[n]) + added[n] + product(a_[n].mT, _times(Z[-1], beta[n]))
        dS = torch.cat([dS_, ended])
    return torch.cat(Z[::-1]), torch.cat(after[::-1]), dS


def _gradients_of_block(
    after: bool, by: Arithmetic, alive: list[int], S: Tensor, dS: Tensor, d_o: Tensor, rows: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of the arguments of ``_block``, which is recomputed."""
    p, product = _parts(after, by, **rows), by.product
    walk = _walk(p, alive, S)
    X, before = torch.cat(walk.X), torch.cat(walk.before)
    q, a, columns, g = p.inputs[:4]
    Z, d_after, dS = _gradients_of_states(p, alive, dS, d_o)
    Y = _times(Z, p.beta)
    U = by.left(p.L, X)
    streams = (U, p.v)[: len(columns)]
    dA = pairs.Pairs(tuple(product(d_o, x.mT) for x in streams), tuple(product(Y, x.mT) for x in streams))
    in_q, in_a = _times(product(d_o, before.mT), p.read), _times(product(Y, before.mT), p.reada)
    in_columns = [_times(product(x, d_after.mT), p.rest) for x in streams]
    of = pairs.backward(p.inputs, p.A, dA)
    dq, da, of_columns = of.q + in_q, of.a + in_a, [x + y for x, y in zip(of.columns, in_columns)]
    found = {"S": dS, "q": dq}
    if len(columns) == 2:
        dv = product(p.A.q[1].mT, d_o) + product(p.A.a[1].mT, Y) + product(_times(columns[1], p.rest), d_after)
        found |= {"k": of_columns[1], "v": dv, "a": da, "b": of_columns[0]}
    else:
        W = p.R + product(_times(a, p.reada), before) + product(p.A.a[0], U)
        found |= {"k": of_columns[0] - da, "v": Y, "beta": (by.stored(Z) * by.stored(W)).sum(-1, keepdim=True)}
    if g is not None:
        assert p.total is not None
        assert of.g is not None
        straddling = sum((c * d for c, d in zip(columns, in_columns)), torch.zeros_like(q))
        terms = beyond(q * in_q) + q * in_q + beyond(a * in_a) + through(straddling, own=False)
        if after:
            terms = terms + a * in_a
        terms = terms + (p.total[..., 0] * (by.stored(before) * by.stored(d_after)).sum(-1))[..., None, :]
        found["g"] = of.g + (terms.sum(-1, keepdim=True) if g.shape[-1] == 1 else terms)
    return found


def _tokens(problem: Delta) -> dict[str, Tensor]:
    """The inputs as [B, T, H, *]."""
    given = {"q": problem.q, "k": problem.k, "v": problem.v, "g": problem.gate, "a": problem.a, "b": problem.b}
    given["beta"] = None if problem.beta is None else problem.beta[..., None]
    return {name: x for name, x in given.items() if x is not None}


def _initial_state(problem: Delta, dtype: torch.dtype) -> Tensor:
    return problem.q.new_zeros(problem.state_shape, dtype=dtype) if problem.initial_state is None else problem.initial_state.to(dtype)


def canonical_forward(problem: Delta, by: Arithmetic = EXACT) -> tuple[Tensor, Tensor]:
    """The forward pass: blocks in order of time, in float32, or float64 for float64 inputs. All operations are differentiable."""
    dtype, after = state_dtype(problem.q.dtype), problem.variant.removal == "after"
    chunks, initial = Chunks.of(problem), _initial_state(problem, dtype)
    if not any(chunks.groups):
        return problem.v.new_zeros(problem.v.shape), initial * 1  # a new tensor, as the schema requires
    sizes = [sum(block.alive) for group in chunks.groups for block in group]
    rows = {name: iter(chunks.rows(x, dtype).split(sizes)) for name, x in _tokens(problem).items()}
    outputs, finals = [], []
    for group, S in zip(chunks.groups, chunks.lanes(initial)):
        for block in group:
            o, S = _block(after, by, block.alive, S, {name: next(parts) for name, parts in rows.items()})
            outputs.append(o)
        finals.append(S)
    output = chunks.tokens(problem.scale * torch.cat(outputs), problem.v.shape)
    return output.to(problem.v.dtype), chunks.sequences(finals)


def canonical_backward(problem: Delta, upstream: Upstream, by: Arithmetic = EXACT) -> Gradients:
    """The backward pass: blocks in reverse order, each recomputed from the states before it.

    The gradients cannot be differentiated again.
    """
    d_output, d_final_state = upstream.gradients
    assert d_output is not None
    dtype, after = state_dtype(problem.q.dtype), problem.variant.removal == "after"
    with torch.inference_mode(False), torch.no_grad():  # inference mode: a compiled graph runs this below autograd
        chunks, tokens, initial = Chunks.of(problem), _tokens(problem), _initial_state(problem, dtype)
        d_final = torch.zeros_like(initial) if d_final_state is None else d_final_state
        kept = {name: problem.of_heads(x) if name in SHARED else x.dtype for name, x in tokens.items()}
        d_tokens = {name: torch.empty(x.shape, dtype=kept[name], device=x.device) for name, x in tokens.items()}
        d_initial = []
        for group, S, dS in zip(chunks.groups, chunks.lanes(initial), chunks.lanes(d_final)):
            before = [S]
            for block in group[:-1]:
                rows = {name: chunks.rows(x, dtype, block.rows) for name, x in tokens.items()}
                before.append(_walk(_parts(after, by, **rows), block.alive, before[-1]).after)
            for block in reversed(group):
                rows = {name: chunks.rows(x, dtype, block.rows) for name, x in tokens.items()}
                d_o = problem.scale * chunks.rows(d_output, dtype, block.rows)
                found = _gradients_of_block(after, by, block.alive, before.pop(), dS, d_o, rows)
                for name, x in d_tokens.items():
                    chunks.write(found[name], block.rows, x)
                dS = found["S"]
            d_initial.append(dS)
        g, beta, state = problem.g, d_tokens.get("beta"), problem.initial_state
        return Gradients(
            d_tokens["q"],
            d_tokens["k"],
            d_tokens["v"],
            None if g is None else d_tokens["g"].view(g.shape),
            None if beta is None else beta[..., 0],
            d_tokens.get("a"),
            d_tokens.get("b"),
            None if state is None else chunks.sequences(d_initial).to(state.dtype),
        )


SUMMARY = "chunks of 64 tokens, plain PyTorch on any device"
PREPARED = prepared(Implementation("chunkwise", SUMMARY, canonical_forward, canonical_backward), wide=True)
forward = PREPARED.forward
"""Results of any call, with raw inputs too, by differentiable operations."""
IMPLEMENTATION = replace(PREPARED, advance=partial(advance_by, forward))
