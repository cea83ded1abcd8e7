"""Updates in place of random parts of sequences, in random calls: every bit equals that of each sequence alone in one call."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from cases import Case
from deltas import Delta, named
from pools import pool_of
from torch import Tensor

import penstock as ps
from penstock.tokens.pieces import CHUNK
from penstock.tokens.pools import STEP_TOKENS

Tensors = dict[str, Tensor | None]


def part_of(case: Case, tensors: Tensors, begin: int, end: int) -> Tensors:
    """The arguments for a span of the tokens, by name."""
    timed = of_tokens(case)
    return {name: x[:, begin:end] if name in timed else x for name, x in tensors.items() if name != "initial_state" and x is not None}


def of_tokens(case: Case) -> set[str]:
    """The arguments that have the axis of tokens."""
    return {name for name, axes in case.operator.signatures[case.function].axes.items() if "T" in axes}


def joined(case: Case, parts: list[Tensors], axis: int) -> Tensors:
    """Parts one after another, on the axis of tokens, or as rows of a batch."""
    timed, first = of_tokens(case), parts[0]
    if len(parts) == 1:
        return first
    return {name: torch.cat([one[name] for one in parts], axis) if name in timed else x for name, x in first.items()}


def packed(case: Case, *parts: Tensors) -> Tensors:
    """Arguments of several calls, one after another on the token axis, and their offsets."""
    ends = torch.tensor([0, *(one["q"].shape[1] for one in parts)]).cumsum(0)
    return joined(case, list(parts), 1) | {"cu_seqlens": ends}


@dataclass(frozen=True)
class Sequences:
    """Sequences whose states are rows of a pool."""

    case: Case
    """``T`` is the number of tokens of all sequences."""
    lengths: tuple[int, ...]
    pool: torch.dtype = torch.float32
    layout: str = "contiguous"
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.case}-pool={str(self.pool).removeprefix('torch.')}-{self.layout}"

    @property
    def spans(self) -> list[tuple[int, int]]:
        ends = [0]
        for length in self.lengths:
            ends.append(ends[-1] + length)
        return list(pairwise(ends))

    def call(self, function: Callable[..., Tensor], arguments: Tensors, **options: object) -> Tensor:
        """``ps.advance`` or ``ps.decode_step``."""
        given = named(self.case, arguments, "q", "g") if isinstance(self.case, Delta) else arguments
        return function(self.case.variant, **given, **options)

    def tensors(self) -> Tensors:
        return {name: None if x is None else x.to(self.device) for name, x in self.case.drawn().items()}

    def states(self) -> Tensor:
        """One row a sequence, one for other tokens, and one that is not used."""
        state, _ = pool_of(len(self.lengths) + 2, self.case, self.pool, self.layout)
        if self.device == "cpu":
            return state
        there = torch.empty_strided(state.shape, state.stride(), dtype=state.dtype, device=self.device)
        return there.copy_(state)


def cuts(length: int, chance: random.Random) -> list[int]:
    """Some multiples of 64 and, after the last one, any cuts."""
    whole = length // CHUNK * CHUNK
    found = [t for t in range(CHUNK, whole + 1, CHUNK) if chance.random() < 0.5]
    tail = chance.choice((0.05, 0.3, 1.0))
    found += [t for t in range(max(whole, 1), length) if chance.random() < tail]
    return sorted({0, *found, length})


def alone(s: Sequences, impl: str) -> tuple[list[Tensor], Tensor]:
    """Each sequence in one call of its own: outputs, and the pool."""
    tensors, state = s.tensors(), s.states()
    outputs = []
    for row, (begin, end) in enumerate(s.spans):
        arguments = packed(s.case, part_of(s.case, tensors, begin, end))
        arguments["cu_seqlens"] = arguments["cu_seqlens"].to(s.device)
        slots = torch.tensor([row], device=s.device)
        outputs.append(s.call(ps.advance, arguments, state=state, slots=slots, impl=impl))
    return outputs, state


def together(s: Sequences, impl: str, seed: int, batches: bool = True) -> tuple[list[Tensor], Tensor]:
    """The same, cut, beside parts of other sequences, in any order. ``batches``: also rows of one length without offsets."""
    chance, tensors, state = random.Random(seed), s.tensors(), s.states()
    waiting = {row: [(begin + a, begin + b) for a, b in pairwise(cuts(end - begin, chance))] for row, (begin, end) in enumerate(s.spans)}
    waiting = {row: parts for row, parts in waiting.items() if parts}
    outputs: list[list[Tensor]] = [[] for _ in s.lengths]
    others, case, tokens = len(s.lengths), s.case, s.case.T
    while waiting:
        rows = chance.sample(sorted(waiting), chance.randint(1, len(waiting)))
        spans = [waiting[row].pop(0) for row in rows]
        steps = len({end - begin for begin, end in spans}) == 1 and spans[0][1] - spans[0][0] <= STEP_TOKENS
        kinds = torch.int32 if chance.random() < 0.5 else torch.int64
        if batches and steps and chance.random() < 0.7:
            function, arguments = ps.decode_step, joined(case, [part_of(case, tensors, *span) for span in spans], 0)
        else:
            for slot, length in ((others, chance.randint(0, 80)), (-1, chance.randint(0, 70)), (-3, 0)):
                if chance.random() < 0.6:
                    place, first = chance.randint(0, len(rows)), chance.randint(0, tokens - min(length, tokens))
                    rows.insert(place, slot)
                    spans.insert(place, (first, first + min(length, tokens)))
            function, arguments = ps.advance, packed(case, *(part_of(case, tensors, *span) for span in spans))
            arguments["cu_seqlens"] = arguments["cu_seqlens"].to(s.device, kinds)
        slots = torch.tensor(rows, device=s.device, dtype=kinds)
        if chance.random() < 0.5:
            slots = slots.repeat_interleave(2)[::2]
        found = s.call(function, arguments, state=state, slots=slots, impl=impl)
        lengths = [end - begin for begin, end in spans]
        for row, output in zip(rows, found.split(lengths, 1) if function is ps.advance else found.split(1)):
            if 0 <= row < others:
                outputs[row].append(output)
            elif row < 0:
                assert not output.any()
        waiting = {row: parts for row, parts in waiting.items() if parts}
    empty = tensors["v"][:, :0]
    return [torch.cat(one, 1) if one else empty for one in outputs], state


def check(s: Sequences, impl: str, seeds: range, batches: bool = True) -> None:
    """Equal bits of outputs, of the rows of all sequences, and of the row that no sequence uses."""
    wanted, wanted_state = alone(s, impl)
    used = [*range(len(s.lengths)), len(s.lengths) + 1]
    for seed in seeds:
        found, state = together(s, impl, seed, batches)
        for row, (one, other) in enumerate(zip(found, wanted)):
            assert torch.equal(one, other), (seed, "output", row)
        for row in used:
            assert torch.equal(state[row], wanted_state[row]), (seed, "state", row)
