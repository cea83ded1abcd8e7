"""The chunkwise form in plain PyTorch: any device, any dtype, exact for any decay, differentiable any number of times.

Tokens are cut into chunks. Between chunks a state [K, V] is carried; inside a chunk, all tokens at once:

    S' = exp(sum g) o S + (k_j o exp(sum_{t>j} g_t))^T v_j
    O  = A v + (q_i o exp(sum_{t<=i} g_t)) S                       ["previous": t<i]

A is built by halving. Split a span in two: every token i of the second half sees token j of the first through the
border between them, A_ij = (q_i o exp(sum_{border<t<=i} g_t)) . (k_j o exp(sum_{j<t<=border} g_t)). Both factors are at
most 1 and their sums begin at the border, so there is no overflow and no cancellation of large numbers; then each half is
split again. A decay that is the same for all channels needs no halving: it multiplies A directly.

Chunks are computed in blocks. The backward pass recomputes and differentiates one block at a time, to save memory.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call.implementation import Implementation, Upstream
from ..tokens.chunks import Chunks, beyond, through
from ..tokens.dtypes import state_dtype
from ..tokens.pieces import advance_by
from .declaration import Recurrence, refuses_bonus
from .gradients import Gradients


def _same_for_all_channels(q: Tensor, k: Tensor, g: Tensor | None, own: bool) -> Tensor:
    """A [R, H, C, C] strictly below the diagonal; g [R, H, C, 1] or None."""
    A = (q @ k.mT).tril(-1)
    if g is None:
        return A
    C = q.shape[-2]
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).tril(-1)
    D = torch.where(later, g, 0).cumsum(-2)  # [i, j]: sum over j < t <= i
    return A * (D if own else F.pad(D[..., :-1, :], (0, 0, 1, 0))).exp()


def _by_halving(q: Tensor, k: Tensor, v: Tensor, g: Tensor, own: bool) -> Tensor:
    """A v for A strictly below the diagonal; q, k, g [..., C, K], v [..., C, V], C a power of two."""
    C = q.shape[-2]
    o = torch.zeros_like(v)
    half = C // 2
    while half:
        q_, k_, v_, g_ = (x.unflatten(-2, (C // (2 * half), 2, half)) for x in (q, k, v, g))
        seen = q_[..., 1, :, :] * through(g_[..., 1, :, :], own).exp()
        left = k_[..., 0, :, :] * beyond(g_[..., 0, :, :]).exp()
        crossing = (seen @ left.mT) @ v_[..., 0, :, :]
        o = o + torch.stack([torch.zeros_like(crossing), crossing], -3).flatten(-4, -2)
        half //= 2
    return o


def _states(alive: list[int], S: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
    """The states before each step of a block, and the states after it; S [lanes, H, K, V], k, v, g [R, H, C, *].

    The backward of ``split`` is one ``cat``. The backward of a slice is a tensor of the size of all rows.
    """
    kv = ((k if g is None else k * beyond(g).exp()).mT @ v).split(alive)  # of [R, H, K, V]
    kept = [None] * len(alive) if g is None else g.sum(-2).exp()[..., None].split(alive)  # of [R, H, K or 1, 1]
    before, done = [], []
    for lanes, kv_, kept_ in zip(alive, kv, kept):
        if lanes < S.shape[0]:
            S, ended = S.split([lanes, S.shape[0] - lanes])
            done.append(ended)
        before.append(S)
        S = (S if kept_ is None else S * kept_) + kv_
    return before, torch.cat([S, *reversed(done)]) if done else S


def _block(
    own: bool, alive: list[int], S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, u: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs of a block before ``scale``, and the states after it."""
    weight = q * k if u is None else q * k * u[:, None]
    o = weight.sum(-1, keepdim=True) * v  # the diagonal of A v
    if g is None or g.shape[-1] == 1:
        o = o + _same_for_all_channels(q, k, g, own) @ v
    else:
        o = o + _by_halving(q, k, v, g, own)
    before, S = _states(alive, S, k, v, g)
    return o + (q if g is None else q * through(g, own).exp()) @ torch.cat(before), S


def _gradients_of_block(own: bool, alive: list[int], dS: Tensor, d_o: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the arguments of ``_block``, which is recomputed."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with torch.enable_grad():
        o, S = _block(own, alive, **leaves)
    return dict(zip(leaves, torch.autograd.grad((o, S), tuple(leaves.values()), (d_o, dS))))


def _tokens(problem: Recurrence, dtype: torch.dtype) -> dict[str, Tensor]:
    """q, k, v and the decay, if there is one, expanded to [B, T, H, *]."""
    tokens, gate = {"q": problem.q, "k": problem.k, "v": problem.v}, problem.gate
    if gate is not None:
        if "T" not in problem.variant.decay:
            gate = gate.to(dtype)  # cast before expanding, so that the gradient of a constant decay is summed in this dtype
        tokens["g"] = gate.expand(*problem.q.shape[:3], gate.shape[3])
    return tokens


def _initial_state(problem: Recurrence, dtype: torch.dtype) -> Tensor:
    return problem.q.new_zeros(problem.state_shape, dtype=dtype) if problem.initial_state is None else problem.initial_state.to(dtype)


def forward(problem: Recurrence) -> tuple[Tensor, Tensor]:
    """The forward pass: blocks in order of time, in float32, or float64 for float64 inputs. All operations are differentiable."""
    dtype, own = state_dtype(problem.q.dtype), problem.variant.read == "updated"
    chunks, initial = Chunks.of(problem), _initial_state(problem, dtype)
    if not any(chunks.groups):
        return problem.v.new_zeros(problem.v.shape), initial * 1  # a new tensor, as the schema requires
    sizes = [sum(block.alive) for group in chunks.groups for block in group]
    rows = {name: iter(chunks.rows(x, dtype).split(sizes)) for name, x in _tokens(problem, dtype).items()}
    u = None if problem.u is None else problem.u.to(dtype)
    outputs, finals = [], []
    for group, S in zip(chunks.groups, chunks.lanes(initial)):
        for block in group:
            o, S = _block(own, block.alive, S, **{name: next(parts) for name, parts in rows.items()}, u=u)
            outputs.append(o)
        finals.append(S)
    output = chunks.tokens(problem.scale * torch.cat(outputs), problem.v.shape)
    return output.to(problem.v.dtype), chunks.sequences(finals)


def backward(problem: Recurrence, upstream: Upstream) -> Gradients:
    """The backward pass: blocks in reverse order. Each is recomputed from the states before it and differentiated by autograd.

    The gradients cannot be differentiated again.
    """
    d_output, d_final_state = upstream.gradients
    assert d_output is not None
    dtype, own = state_dtype(problem.q.dtype), problem.variant.read == "updated"
    with torch.inference_mode(False), torch.no_grad():  # inference mode: a compiled graph runs this below autograd
        chunks, tokens, initial = Chunks.of(problem), _tokens(problem, dtype), _initial_state(problem, dtype)
        d_final = torch.zeros_like(initial) if d_final_state is None else d_final_state
        d_tokens = {name: torch.empty(x.shape, dtype=x.dtype, device=x.device) for name, x in tokens.items()}
        u = {} if problem.u is None else {"u": problem.u.to(dtype)}
        du = {name: torch.zeros_like(x) for name, x in u.items()}
        d_initial = []
        for group, S, dS in zip(chunks.groups, chunks.lanes(initial), chunks.lanes(d_final)):
            before = [S]
            for block in group[:-1]:
                rows = {name: chunks.rows(x, dtype, block.rows) for name, x in tokens.items() if name != "q"}
                before.append(_states(block.alive, before[-1], **rows)[1])
            for block in reversed(group):
                rows = {name: chunks.rows(x, dtype, block.rows) for name, x in tokens.items()}
                d_o = problem.scale * chunks.rows(d_output, dtype, block.rows)
                found = _gradients_of_block(own, block.alive, dS, d_o, {"S": before.pop(), **rows, **u})
                for name, x in d_tokens.items():
                    chunks.write(found[name], block.rows, x)
                dS = found["S"]
                du = {name: x + found[name] for name, x in du.items()}
            d_initial.append(dS)
        g, gate, state = problem.g, problem.gate, problem.initial_state
        return Gradients(
            d_tokens["q"],
            d_tokens["k"],
            d_tokens["v"],
            None if g is None or gate is None else d_tokens["g"].sum_to_size(gate.shape).to(g.dtype).view(g.shape),
            None if problem.u is None else du["u"].to(problem.u.dtype),
            None if state is None else chunks.sequences(d_initial).to(state.dtype),
        )


IMPLEMENTATION = Implementation(
    name="chunkwise",
    summary="chunks of 64 tokens, plain PyTorch on any device",
    forward=forward,
    backward=backward,
    advance=partial(advance_by, forward),
    refuses=refuses_bonus,
)
