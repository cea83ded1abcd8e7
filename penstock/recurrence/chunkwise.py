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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call.implementation import Implementation, Upstream
from ..tokens.dtypes import state_dtype
from ..tokens.pieces import advance_by
from .declaration import Recurrence, refuses_bonus
from .gradients import Gradients

CHUNK = 64
"""Tokens in a chunk, a power of two. At K = V = 64 the products inside a chunk then cost as much as those with the state."""
BLOCKS = 16
"""A block has at most 1/16 of the tokens: its intermediates then take about as much memory as inputs and outputs, or less."""
BLOCK = 1 << 19
"""A block may always have this many elements in its largest tensor, because small blocks are slow. rwkv6 (1,1024,32,64), forward and
backward, 2 threads with 512 KiB of L2 cache each: 490 ms with 2^18, 440 ms with 2^19, 425 ms with 2^20, 531 ms without blocks."""


@dataclass(frozen=True)
class Block:
    """Consecutive steps of a group, computed together."""

    rows: slice
    alive: list[int]  # [steps] number of lanes with a chunk at this step


@dataclass(frozen=True)
class Chunks:
    """The layout of the tokens in rows of C, one chunk per row.

    A lane is a sequence. Lanes are ordered by number of chunks, the longest first, and cut into groups. The rows of a group are the
    first chunks of its lanes, then their second chunks, and so on. So the first ``alive[step]`` lanes of the group have a chunk at a
    step. The steps of a group are cut into blocks.
    """

    order: Tensor  # [N] sequence of each lane
    width: int  # the maximum number of lanes in a group, and of rows in a block
    groups: list[list[Block]]
    token: Tensor  # [R, C] index of the token (of B * T) at each position; 0 in the padding
    padding: Tensor | None  # [R, C] True in the padding, or None if there is none
    place: Tensor  # [B * T] the position of each token in the rows

    @classmethod
    def of(cls, problem: Recurrence) -> Chunks:
        """Lay out the sequences of a problem. Reads cu_seqlens on the host."""
        spans, T, device = problem.spans(), problem.q.shape[1], problem.q.device
        starts = [begin + (0 if problem.cu_seqlens is not None else n * T) for n, (begin, _) in enumerate(spans)]
        lengths = [end - begin for begin, end in spans]
        longest = max(lengths, default=0)
        C = min(CHUNK, 1 << max(longest - 1, 0).bit_length())
        _, H, K, V = problem.state_shape
        elements = H * max(C * K, C * V, K * V // 4)  # per row; a block has fewer tensors of states than of tokens
        width = max(1, BLOCK // max(1, elements), sum(lengths) // (C * BLOCKS))
        order = sorted(range(len(spans)), key=lambda n: -lengths[n])
        groups, firsts, counts = [], [], []
        for lanes in (order[lane : lane + width] for lane in range(0, max(len(order), 1), width)):
            alive = []
            for from_ in range(0, lengths[lanes[0]] if lanes else 0, C):
                running = [n for n in lanes if lengths[n] > from_]
                alive.append(len(running))
                firsts += [starts[n] + (lengths[n] - 1 - from_ if problem.reverse else from_) for n in running]
                counts += [min(lengths[n] - from_, C) for n in running]
            groups.append(_blocks(alive, len(firsts) - sum(alive), width))
        column = torch.arange(C, device="cpu")
        token = torch.tensor(firsts, dtype=torch.long, device="cpu")[:, None] + (-column if problem.reverse else column)
        padding = column >= torch.tensor(counts, dtype=torch.long, device="cpu")[:, None]
        place = torch.empty(sum(lengths), dtype=torch.long, device="cpu")
        place[token[~padding]] = (~padding).flatten().nonzero()[:, 0]
        return cls(
            torch.tensor(order, dtype=torch.long, device=device),
            width,
            groups,
            token.masked_fill(padding, 0).to(device),
            padding.to(device) if any(count < C for count in counts) else None,
            place.to(device),
        )

    def rows(self, x: Tensor, dtype: torch.dtype, part: slice = slice(None)) -> Tensor:
        """[B, T, H, *] to [R, H, C, *], or a part of its rows; zeros in the padding."""
        rows = x.flatten(0, 1)[self.token[part]].to(dtype)
        if self.padding is not None:
            rows = rows.masked_fill(self.padding[part][:, :, None, None], 0)
        return rows.transpose(1, 2)

    def tokens(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """[R, H, C, V] back to [B, T, H, V]."""
        return rows.transpose(1, 2).flatten(0, 1)[self.place].view(shape)

    def write(self, rows: Tensor, part: slice, x: Tensor) -> None:
        """Write a part of the rows to their tokens in x [B, T, H, *], which must be contiguous."""
        token, rows = self.token[part], rows.transpose(1, 2)
        if self.padding is not None:
            real = ~self.padding[part]
            token, rows = token[real], rows[real]
        x.flatten(0, 1)[token] = rows.to(x.dtype)

    def lanes(self, S: Tensor) -> tuple[Tensor, ...]:
        """[N, H, K, V] to the states of each group's lanes."""
        groups: tuple[Tensor, ...] = S[self.order].split(self.width)
        return groups

    def sequences(self, states: list[Tensor]) -> Tensor:
        """The states of each group's lanes back to [N, H, K, V]."""
        return torch.cat(states)[self.order.argsort()]


def _blocks(alive: list[int], row: int, width: int) -> list[Block]:
    """Cut the steps of a group into blocks; ``row`` is its first."""
    blocks = []
    while alive:
        steps = width // alive[0]
        rows = slice(row, row + sum(alive[:steps]))
        blocks.append(Block(rows, alive[:steps]))
        row, alive = rows.stop, alive[steps:]
    return blocks


def through(g: Tensor, own: bool) -> Tensor:
    """Sums over axis -2 from its beginning up to each token, its own decay included or not."""
    return g.cumsum(-2) if own else F.pad(g.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))


def beyond(g: Tensor) -> Tensor:
    """Sums over axis -2 of all tokens after each token."""
    return through(g.flip(-2), own=False).flip(-2)


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
