"""From logits to tokens, for all rows of a step together.

A row's token depends on its own logits, parameters, seed and position only, to the bit: probabilities are whole numbers of 2**-44 of the
most likely token's, whose sums have no order; and the random number of a row is a hash of its seed and position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.sampling import LOWEST_TEMPERATURE
from .request import Constraint, SamplingParams, Sequence, TokenLogprobs
from .transfer import ToHost, to_device

ONE = 2.0**44
"""The weight of the most likely token. Sums of 2**19 of them fit int64."""
_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio."""


@dataclass(eq=False)
class Row:
    """One row of logits, and what its token depends on."""

    params: SamplingParams
    seed: int
    position: int
    """The number of tokens before the sampled one."""
    counts: dict[int, int]
    """How often tokens were generated. Read with penalties only."""
    prompt: Items[int] = ()
    """Read with a repetition penalty only."""
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        self.key = _key(self.seed)

    @classmethod
    def of(cls, one: Sequence) -> Row:
        """The row of a sequence; its position is set by each step."""
        return cls(one.request.params, seed_of(one.request.seed, one.index), 0, one.counts, one.request.prompt, one.constraint)


def mixed(value: int) -> int:
    """A hash of 64 bits (the finaliser of SplitMix64; Steele, Lea and Flood 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number from 0 to 1 - 2**-53, a function of seed and position."""
    return _uniform(_key(seed), position)


def _key(seed: int) -> int:
    return mixed((seed + _STEP) & _MASK)


def _uniform(key: int, position: int) -> float:
    return (mixed((key + position * _STEP) & _MASK) >> 11) * 2.0**-53


def seed_of(seed: int, index: int) -> int:
    """The seed of completion ``index``."""
    return seed if index == 0 else mixed((seed + index * 0xD1342543DE82EF95) & _MASK)


def sample(logits: Tensor, rows: Items[Row], vocab_size: int | None = None) -> Tensor:
    """One token for each row of logits [R,V]: int64 [R].

    vocab_size : int, optional
        Sample tokens below it only: that of the tokenizer, where the model has more.
    """
    if vocab_size is not None and vocab_size < logits.shape[1]:
        logits = logits[:, :vocab_size]
    logits = _changed(logits, rows)
    drawn = [n for n, row in enumerate(rows) if not row.params.greedy]
    if not drawn:
        return logits.argmax(-1)
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    tokens = logits.argmax(-1)
    chosen = to_device(drawn, logits.device)
    tokens[chosen] = _draw(logits[chosen], [rows[n] for n in drawn])
    return tokens


def _changed(logits: Tensor, rows: Items[Row]) -> Tensor:
    """Logits with bias, penalties and masks: float64 if there are any."""
    changed = [n for n, row in enumerate(rows) if row.params.logit_bias or row.params.penalised or row.constraint]
    if not changed:
        return logits
    logits = logits.to(torch.float64, copy=True)
    for n in changed:
        params, row, V = rows[n].params, logits[n], logits.shape[1]
        if params.logit_bias:
            bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < V}
            row[to_device(list(bias), row.device, torch.int64)] += to_device(list(bias.values()), row.device, row.dtype)
        if params.repetition_penalty != 1:
            seen = to_device([token for token in {*rows[n].prompt, *rows[n].counts} if token < V], row.device, torch.int64)
            before = row[seen]
            row[seen] = torch.where(before > 0, before / params.repetition_penalty, before * params.repetition_penalty)
        if rows[n].counts and (params.presence_penalty or params.frequency_penalty):
            tokens = to_device(list(rows[n].counts), row.device)
            counts = to_device(list(rows[n].counts.values()), row.device, row.dtype)
            row[tokens] -= params.presence_penalty + params.frequency_penalty * counts
        constraint = rows[n].constraint
        if constraint is not None:
            row.masked_fill_(~_bits(constraint.mask, V).to(row.device), -math.inf)
    return logits


def _bits(mask: bytes, count: int) -> Tensor:
    """The first bits of a mask: bool [count]."""
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    return (packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[:count].bool()


def _draw(logits: Tensor, rows: Items[Row]) -> Tensor:
    """Sample rows of temperature above 0."""
    weights = _weights(logits, [row.params.temperature for row in rows])
    device = logits.device
    uniforms = to_device([_uniform(row.key, row.position) for row in rows], device, torch.float64)
    limited = [n for n, row in enumerate(rows) if row.params.top_k or row.params.top_p < 1]
    min_p = [row.params.min_p for row in rows]
    if any(min_p):
        least = to_device([math.ceil(p * ONE) for p in min_p], device)
        weights = weights.masked_fill(weights < least[:, None], 0)
    if limited:
        chosen = to_device(limited, device)
        some = weights if len(limited) == len(rows) else weights[chosen]
        some = _limited(some, [rows[n].params for n in limited])
        weights = some if len(limited) == len(rows) else weights.index_copy(0, chosen, some)
    sums = weights.cumsum(-1)
    total = sums[:, -1]
    drawn = torch.minimum((uniforms * total.double()).long(), total - 1)
    return torch.searchsorted(sums, drawn[:, None], right=True).squeeze(-1).clamp(max=weights.shape[1] - 1)  # logits may be NaN


def _weights(logits: Tensor, temperatures: Items[float]) -> Tensor:
    """exp((logit - largest) / temperature) as whole numbers of 1 / ONE: int64 [R,V]. At least 1 row has ONE."""
    logits = logits.double()
    scale = to_device([max(float(one), LOWEST_TEMPERATURE) for one in temperatures], logits.device, torch.float64)
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(scale[:, None])
    return scaled.exp_().mul_(ONE).long()


def _limited(weights: Tensor, params: Items[SamplingParams]) -> Tensor:
    """Weights [R,V] with 0 outside of the top k, then outside of the nucleus of what is left."""
    V = weights.shape[1]
    ranked, tokens = weights.sort(dim=-1, descending=True, stable=True)
    most = to_device([min(one.top_k or V, V) for one in params], weights.device)
    ranked = ranked.masked_fill(torch.arange(V, device=weights.device) >= most[:, None], 0)
    sums = ranked.cumsum(-1)
    before = sums - ranked
    share = to_device([one.top_p for one in params], weights.device, torch.float64)
    ranked = ranked.masked_fill(before.double() >= share[:, None] * sums[:, -1:].double(), 0)
    return torch.zeros_like(weights).scatter_(1, tokens, ranked)


def logprobs_of(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """For rows of logits [R,V] and tokens [R]: log probabilities [R], and the ``most`` best tokens and their log probabilities [R,most]."""
    total = _weights(logits, [1.0] * len(tokens)).sum(-1, keepdim=True)  # of whole numbers: torch's log_softmax depends on the other rows
    scores = logits.double() - logits.double().amax(-1, keepdim=True)
    scores = (scores - torch.log(total / ONE)).float()
    best, names = scores.topk(min(most, scores.shape[1]), -1)
    return scores.gather(1, tokens[:, None]).squeeze(1), names, best


def to_logprobs(tokens: Items[int], found: tuple[ToHost, ToHost, ToHost], wanted: Items[int]) -> list[TokenLogprobs]:
    """The same for callers; row r gets its ``wanted[r]`` best tokens."""
    own, names, best = (x.tolist() for x in found)
    return [
        TokenLogprobs(token, own[r], tuple(zip(names[r][: wanted[r]], best[r][: wanted[r]]))) for r, token in enumerate(tokens)
    ]  # fmt: skip
