"""The chunkwise form in plain PyTorch: any device, any dtype, exact for any decay, differentiable any number of times.

Tokens are cut into chunks. Between chunks a state [K, V] is carried; inside a chunk, all tokens at once:

    S' = exp(sum g) o S + (k_j o exp(sum_{t>j} g_t))^T v_j
    O  = A v + (q_i o exp(sum_{t<=i} g_t)) S                       ["previous": t<i]

A is built by halving. Split a stretch in two: every token i of the second half sees token j of the first through the
border between them, A_ij = (q_i o exp(sum_{border<t<=i} g_t)) . (k_j o exp(sum_{j<t<=border} g_t)). Both factors are at
most 1 and their sums begin at the border, so nothing can overflow and nothing large cancels; then each half is split
again. A decay that is the same for all channels needs no halving: it multiplies A directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call.implementation import Implementation
from .advance import advance_by
from .declaration import Recurrence, state_dtype

CHUNK = 64
"""Tokens in a chunk, a power of two. At K = V = 64 the products inside a chunk then cost as much as those with the state."""


@dataclass(frozen=True)
class Chunks:
    """Where the tokens of every sequence go: rows of C tokens, in the order in which states pass through them.

    All first chunks come first, then all second chunks, and so on; sequences are ordered by their number of chunks, the
    longest first, so that those still running are always the first ``alive[step]``.
    """

    order: Tensor  # [N] sequence of each lane
    alive: list[int]  # [steps] number of lanes with a chunk at this step
    token: Tensor  # [R, C] which token (of B * T) stands where; 0 in the padding
    padding: Tensor | None  # [R, C] True in the padding, or None if there is none
    place: Tensor  # [B * T] where each token stands in the rows

    @classmethod
    def of(cls, problem: Recurrence) -> Chunks:
        """Lay out the sequences of a problem. Reads cu_seqlens on the host."""
        spans, T, device = problem.spans(), problem.q.shape[1], problem.q.device
        starts = [begin + (0 if problem.cu_seqlens is not None else n * T) for n, (begin, _) in enumerate(spans)]
        lengths = [end - begin for begin, end in spans]
        longest = max(lengths, default=0)
        C = min(CHUNK, 1 << max(longest - 1, 0).bit_length())
        order = sorted(range(len(spans)), key=lambda n: -lengths[n])
        alive, firsts, counts = [], [], []
        for from_ in range(0, longest, C):
            running = [n for n in order if lengths[n] > from_]
            alive.append(len(running))
            firsts += [starts[n] + from_ for n in running]
            counts += [min(lengths[n] - from_, C) for n in running]
        column = torch.arange(C)
        token = torch.tensor(firsts, dtype=torch.long)[:, None] + column
        padding = column >= torch.tensor(counts, dtype=torch.long)[:, None]
        place = torch.empty(sum(lengths), dtype=torch.long)
        place[token[~padding]] = (~padding).flatten().nonzero()[:, 0]
        return cls(
            torch.tensor(order, dtype=torch.long, device=device),
            alive,
            token.masked_fill(padding, 0).to(device),
            padding.to(device) if bool(padding.any()) else None,
            place.to(device),
        )

    def rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, H, *] to [R, H, C, *], zeros in the padding."""
        rows = x.flatten(0, 1)[self.token].to(dtype)
        if self.padding is not None:
            rows = rows.masked_fill(self.padding[:, :, None, None], 0)
        return rows.transpose(1, 2)

    def tokens(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """[R, H, C, V] back to [B, T, H, V]."""
        return rows.transpose(1, 2).flatten(0, 1)[self.place].view(shape)


def _through(g: Tensor, own: bool) -> Tensor:
    """Sums over axis -2 from its beginning up to each token, its own decay included or not."""
    return g.cumsum(-2) if own else F.pad(g.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))


def _beyond(g: Tensor) -> Tensor:
    """Sums over axis -2 of all tokens after each token."""
    return _through(g.flip(-2), own=False).flip(-2)


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
        seen = q_[..., 1, :, :] * _through(g_[..., 1, :, :], own).exp()
        left = k_[..., 0, :, :] * _beyond(g_[..., 0, :, :]).exp()
        crossing = (seen @ left.mT) @ v_[..., 0, :, :]
        o = o + torch.stack([torch.zeros_like(crossing), crossing], -3).flatten(-4, -2)
        half //= 2
    return o


def forward(problem: Recurrence) -> tuple[Tensor, Tensor]:
    """All chunks at once, then the states one chunk after another; float32, or float64 for float64 inputs."""
    problem, dtype = problem.forward_in_time(), state_dtype(problem.q.dtype)
    S = problem.q.new_zeros(problem.state_shape, dtype=dtype) if problem.initial_state is None else problem.initial_state.to(dtype)
    chunks, own = Chunks.of(problem), problem.variant.read == "updated"
    if not chunks.alive:
        return problem.back_in_time(problem.v.new_zeros(problem.v.shape), S * 1)  # new, as its gradient will be
    q, k, v = (chunks.rows(x, dtype) for x in (problem.q, problem.k, problem.v))
    g = None
    if problem.gate is not None:
        gate = problem.gate.to(dtype)  # before it is expanded: the gradient of a constant decay is then summed in this dtype
        g = chunks.rows(gate.expand(*problem.q.shape[:3], gate.shape[3]), dtype)

    weight = q * k if problem.u is None else q * k * problem.u.to(dtype)[:, None]
    o = weight.sum(-1, keepdim=True) * v  # what a token sees of itself
    if g is None or g.shape[-1] == 1:
        o = o + _same_for_all_channels(q, k, g, own) @ v
    else:
        o = o + _by_halving(q, k, v, g, own)

    kv = (k if g is None else k * _beyond(g).exp()).mT @ v  # [R, H, K, V]
    kept = None if g is None else g.sum(-2).exp()[..., None]  # [R, H, K or 1, 1]
    S, before, done, row = S[chunks.order], [], [], 0
    for alive in chunks.alive:
        if alive < S.shape[0]:
            done.append(S[alive:])
            S = S[:alive]
        before.append(S)
        S = (S if kept is None else S * kept[row : row + alive]) + kv[row : row + alive]
        row += alive
    o = o + (q if g is None else q * _through(g, own).exp()) @ torch.cat(before)
    final = torch.cat([S, *reversed(done)])[chunks.order.argsort()]
    return problem.back_in_time(chunks.tokens(problem.scale * o, problem.v.shape).to(problem.v.dtype), final)


IMPLEMENTATION = Implementation(
    name="chunkwise",
    summary="chunks of 64 tokens, plain PyTorch on any device",
    forward=forward,
    advance=partial(advance_by, forward),
)
