"""The tokens of sequences in chunks, for passes in plain PyTorch: rows of chunks, blocks of rows computed together, sums of decays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .problem import OverSequences

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
    def of(cls, problem: OverSequences) -> Chunks:
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
        place = torch.empty(sum(lengths) + 1, dtype=torch.long, device="cpu")  # the last is that of the padding
        place[token.masked_fill(padding, sum(lengths))] = torch.arange(token.numel(), device="cpu").view_as(token)
        return cls(
            torch.tensor(order, dtype=torch.long, device=device),
            width,
            groups,
            token.masked_fill(padding, 0).to(device),
            padding.to(device) if any(count < C for count in counts) else None,
            place[:-1].to(device),
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
