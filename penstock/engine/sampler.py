"""From logits to tokens, for all rows of a step together.

A row's token depends on its own logits, parameters, seed and position only, to the bit: probabilities are whole numbers of 2**-44 of the
most likely token's, whose sums have no order; and the random number of a row is a hash of its seed and position.

What a row needs at every step is in tables on the device, at its slot, from its first token on: its parameters and the key of its random
numbers, its biases, and how often it has which token. A step copies one list of numbers to the device, whatever its rows ask for.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from ..gpu.target import unavailable
from ..models.sampling import LOWEST_TEMPERATURE
from .request import Constraint, SamplingParams, Sequence, TokenLogprobs
from .transfer import ToHost, from_buffer, to_device
from .uniforms import key_of, seed_of, uniforms

ONE = 2.0**44
"""The weight of the most likely token."""
MOST_TOKENS = 2**19 - 1
"""Sums of so many weights fit int64."""
NO_TOKEN = -1
"""In the place of a token where the largest logit is not finite."""
NOT_DRAWN = -1
"""In the place of the position of a row that takes the most likely token."""
CANDIDATES = 256
"""The most likely tokens that are ranked before all are."""
MANY_ROWS = 16
"""From this number on, a kernel finds the ranks that are kept on a GPU; for fewer, sorting them is faster."""
DRAWN, LIMITED, NUCLEUS, FLOORED, BIASED, REPEATED, COUNTED, PENALISED, CONSTRAINED = (1 << n for n in range(9))
"""What a row needs beyond the largest logit: a draw, top_k or top_p, top_p, min_p, logit_bias, a repetition penalty, presence or frequency
penalties, any of the three, a constraint."""
SCALE, LAST_RANK, SHARE, LEAST, REPETITION, PRESENCE, FREQUENCY, KEY, COLUMNS = range(9)
"""Columns of the table of parameters. All values are exact in float64; KEY has the bits of an integer."""


@dataclass(eq=False)
class Row:
    """One row of logits, and what its token depends on beside its position."""

    params: SamplingParams
    seed: int
    tokens: Items[int] = ()
    """Those before the first sampled one. Read with penalties only, when the row enters its slot."""
    prompt: int = 0
    """The number of them that are of the prompt."""
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        params = self.params
        self.owner = object()
        found = {
            BIASED: params.logit_bias, REPEATED: params.repetition_penalty != 1, CONSTRAINED: self.constraint is not None,
            COUNTED: params.presence_penalty or params.frequency_penalty, PENALISED: params.penalised,
        }  # fmt: skip
        if not params.greedy:
            found |= {DRAWN: True, LIMITED: params.top_k or params.top_p < 1, NUCLEUS: params.top_p < 1, FLOORED: params.min_p}
        self.needs = sum(need for need, true in found.items() if true)
        self.logprobs = -1 if params.logprobs is None else params.logprobs

    @classmethod
    def of(cls, one: Sequence) -> Row:
        """The row of a sequence."""
        return cls(one.request.params, seed_of(one.request.seed, one.index), one.tokens, len(one.request.prompt), one.constraint)


class Places:
    """Which rows of a step need what; with their numbers, on the device."""

    def __init__(self, rows: Items[Row], slots: Items[int], positions: Items[int], device: torch.device) -> None:
        needs = [row.needs for row in rows]
        self.any = 0
        for one in set(needs):
            self.any |= one
        values = array("q", slots)
        spans: dict[int, tuple[int, int]] = {}
        drawn = needs if self.any & DRAWN else []
        for need in (DRAWN, BIASED, PENALISED, CONSTRAINED, LIMITED):
            if self.any & need:
                among = drawn if need == LIMITED else needs
                chosen = [n for n, one in enumerate(among) if one & need]
                if need == DRAWN:
                    drawn = [one for one in needs if one & DRAWN]
                if len(chosen) < len(among):
                    spans[need] = len(values), len(chosen)
                    values.extend(chosen)
        count, ends = len(slots), len(values)
        values.extend(positions if len(drawn) == count else [at if one & DRAWN else NOT_DRAWN for at, one in zip(positions, needs)])
        copied = from_buffer(values, device)
        self.slots = copied[:count]
        """Of all rows: int64 [R]."""
        self.positions = copied[ends:]
        """The same; ``NOT_DRAWN`` if the row is not drawn."""
        self._places = {need: copied[begin : begin + size] for need, (begin, size) in spans.items()}

    def all_need(self, need: int) -> bool:
        """Whether every row needs something."""
        return bool(self.any & need) and need not in self._places

    def of(self, need: int, x: Tensor) -> Tensor:
        """The rows of ``x`` that need something; those of LIMITED are among those of DRAWN."""
        places = self._places.get(need)
        return x if places is None else x.index_select(0, places)

    def put(self, need: int, x: Tensor, values: Tensor) -> Tensor:
        """``x`` with these rows set to ``values``, in place unless all are."""
        places = self._places.get(need)
        return values if places is None else x.index_copy_(0, places, values)


class Sampler:
    """Samples for the rows of slots.

    vocab_size : int
        Tokens are below it: that of the tokenizer, where the model has more.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._kernels = device.type == "cuda" and unavailable() is None
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        """The last sampled token of each slot, or ``NO_TOKEN``."""
        self._no_token = self.last.new_full((), NO_TOKEN)
        self._owners: list[object] = [None] * slots
        """Whose values the tables have."""
        self._table = torch.ones(slots, COLUMNS, dtype=torch.float64, device=device)
        self._biases = [torch.zeros(slots, 1, dtype=dtype, device=device) for dtype in (torch.int64, torch.float64)]
        """Tokens [slots,W] and values [slots,W]. Shorter ones are filled up with their first token."""
        self._seen: Tensor | None = None
        """int32 [slots,V]: twice how often a token was generated, and 1 more if it is in the prompt."""
        self._ranks = torch.arange(vocab_size, device=device)
        self._bits = (vocab_size - 1).bit_length()
        self._names = (vocab_size - 1) - self._ranks - (1 << 43 + self._bits)
        """Added to a weight times 2**_bits: a number for each pair of weight and token, larger for larger weights, then lower tokens."""

    def sample(self, logits: Tensor, rows: Items[Row], slots: Items[int], positions: Items[int]) -> Tensor:
        """One token for each row of logits [R,V]: int64 [R]; ``NO_TOKEN`` where the largest logit, of those that may follow, is not finite.

        slots : list of int
            Of each row, all different.
        positions : list of int
            The number of tokens before each sampled one. Those of a row in its slot grow by 1.
        """
        self._enter(rows, slots)
        if self.vocab_size < logits.shape[1]:
            logits = logits[:, : self.vocab_size]
        step = Places(rows, slots, positions, self.device)
        picked = self._kernels and not step.any & LIMITED
        selected = step.any & PENALISED or (step.any & DRAWN and not picked)
        params = self._table.index_select(0, step.slots) if selected else self._table
        if step.any & (BIASED | PENALISED | CONSTRAINED):
            logits = self._changed(logits, rows, params, step)
        if picked:
            tokens = self._picked(logits, step)
        elif step.all_need(DRAWN):
            tokens = self._draw(logits, rows, params, step)
        else:
            largest, tokens = logits.max(-1)  # the lowest of equal ones
            tokens = torch.where(largest.abs() < math.inf, tokens, self._no_token)
            if step.any & DRAWN:
                step.put(DRAWN, tokens, self._draw(step.of(DRAWN, logits), rows, step.of(DRAWN, params), step))
        if not picked:
            self.last.index_copy_(0, step.slots, tokens)
        if step.any & PENALISED:
            assert self._seen is not None
            places = step.of(PENALISED, step.slots * self.vocab_size + tokens.clamp(min=0))
            self._seen.view(-1).index_add_(0, places, places.new_full((1,), 2, dtype=torch.int32).expand(len(places)))
        return tokens

    # tables

    def _enter(self, rows: Items[Row], slots: Items[int]) -> None:
        """Write what rows need that were not in their slots at their last step."""
        owners = self._owners
        fresh = [n for n, row in enumerate(rows) if owners[slots[n]] is not row.owner]
        if not fresh:
            return
        values = array("d")
        for n in fresh:
            owners[slots[n]] = rows[n].owner = object()  # a new one: the row may come back to an earlier slot, whose counts are old
            values.append(slots[n])
            values.extend(self._parameters(rows[n]))
        copied = from_buffer(values, self.device).view(len(fresh), 1 + COLUMNS)
        self._table.index_copy_(0, copied[:, 0].long(), copied[:, 1:])
        for n in fresh:
            if rows[n].needs & BIASED:
                self._enter_biases(slots[n], rows[n])
            if rows[n].needs & PENALISED:
                self._enter_seen(slots[n], rows[n])

    def _parameters(self, row: Row) -> array[float]:
        """A row of the table."""
        params, found = row.params, [1.0] * KEY
        found[SCALE] = max(float(params.temperature), LOWEST_TEMPERATURE)
        found[LAST_RANK] = min(params.top_k or self.vocab_size, self.vocab_size) - 1
        found[SHARE] = params.top_p if params.top_p < 1 else 2.0  # more than all, also where sums are rounded
        found[LEAST] = math.ceil(params.min_p * ONE)
        found[REPETITION], found[PRESENCE], found[FREQUENCY] = (
            float(one) for one in (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        )
        values = array("d", found)
        values.frombytes(array("Q", [key_of(row.seed)]).tobytes())
        return values

    def _enter_biases(self, slot: int, row: Row) -> None:
        tokens, values = list(row.params.logit_bias), [float(one) for one in row.params.logit_bias.values()]
        missing = self._biases[0].shape[1] - len(tokens)
        if missing < 0:
            more = (1 << (len(tokens) - 1).bit_length()) - self._biases[0].shape[1]
            self._biases = [torch.cat([x, x[:, :1].expand(-1, more)], 1) for x in self._biases]
            missing += more
        self._biases[0][slot] = to_device(tokens + tokens[:1] * missing, self.device)
        self._biases[1][slot] = to_device(values + values[:1] * missing, self.device, torch.float64)

    def _enter_seen(self, slot: int, row: Row) -> None:
        V = self.vocab_size
        if self._seen is None:
            self._seen = torch.zeros(len(self._owners), V, dtype=torch.int32, device=self.device)
        seen = self._seen[slot]
        seen.zero_()
        tokens = array("q", row.tokens)
        prompt = [token for token in tokens[: row.prompt] if token < V]
        if prompt:
            seen.index_fill_(0, to_device(prompt, self.device), 1)
        if len(tokens) > row.prompt:
            places = from_buffer(tokens[row.prompt :], self.device)
            seen.index_add_(0, places, torch.full_like(places, 2, dtype=torch.int32))

    # logits

    def _changed(self, logits: Tensor, rows: Items[Row], params: Tensor, step: Places) -> Tensor:
        """Logits with bias, penalties and masks, in float64."""
        logits = logits.to(torch.float64, copy=True)
        if step.any & BIASED:
            some, slots = step.of(BIASED, logits), step.of(BIASED, step.slots)
            tokens, values = (x.index_select(0, slots) for x in self._biases)
            logits = step.put(BIASED, logits, some.scatter_(1, tokens, some.gather(1, tokens).add_(values)))
        if step.any & PENALISED:
            assert self._seen is not None
            some = step.of(PENALISED, logits)
            seen = self._seen.index_select(0, step.of(PENALISED, step.slots))
            logits = step.put(PENALISED, logits, _penalised(some, seen, step.of(PENALISED, params), step.any))
        if step.any & CONSTRAINED:
            excluded = self._excluded([row.constraint for row in rows if row.constraint is not None])
            logits = step.put(CONSTRAINED, logits, step.of(CONSTRAINED, logits).masked_fill_(excluded, -math.inf))
        return logits

    def _excluded(self, constraints: Items[Constraint]) -> Tensor:
        """Which tokens may not follow: bool [R,V]."""
        size = -(-self.vocab_size // 8)
        masks = from_buffer(bytearray().join(one.mask[:size].ljust(size, b"\0") for one in constraints), self.device)
        bits = masks.view(-1, size, 1).bitwise_right_shift(self._ranks[:8].to(torch.uint8)).bitwise_and_(1)
        return bits.view(len(constraints), -1)[:, : self.vocab_size] == 0

    # draws

    def _draw(self, logits: Tensor, rows: Items[Row], params: Tensor, step: Places) -> Tensor:
        """Sample rows of temperature above 0."""
        largest = logits.amax(-1, keepdim=True)
        weights = _weights(logits, largest, params[:, SCALE : SCALE + 1])
        if step.any & FLOORED:
            weights = weights.masked_fill_(weights < params[:, LEAST : LEAST + 1], 0)
        if step.any & LIMITED:
            tops = [row.params.top_k for row in rows if row.needs & LIMITED]
            most = self.vocab_size if 0 in tops else max(tops)
            some = self._limited(step.of(LIMITED, weights), step.of(LIMITED, params), most, any(tops), bool(step.any & NUCLEUS))
            weights = step.put(LIMITED, weights, some)
        keys, positions = params[:, KEY].view(torch.int64), step.of(DRAWN, step.positions)
        if self._kernels:
            from .drawing import draw

            tokens = draw(weights, keys, positions)
        else:
            sums = weights.cumsum(-1)
            total = sums[:, -1]
            drawn = torch.minimum((uniforms(keys, positions) * total).long(), total - 1)
            tokens = torch.searchsorted(sums, drawn[:, None], right=True).squeeze(-1)
        return torch.where(largest.squeeze(1).abs() < math.inf, tokens, self._no_token)

    def _picked(self, logits: Tensor, step: Places) -> Tensor:
        """Tokens [R] of logits [R,V] by one kernel, which also writes ``last``."""
        from .drawing import pick

        table = self._table
        return pick(logits, table[:, SCALE], table[:, LEAST], table[:, KEY].view(torch.int64), step.slots, step.positions, self.last)

    def _limited(self, weights: Tensor, params: Tensor, most: int, ranked: bool, nucleus: bool) -> Tensor:
        """Weights [R,V] with 0 outside of the top k, then outside of the nucleus of what is left.

        No k is above ``most``; ``ranked``: some row has one; ``nucleus``: some row has a share below 1.
        """
        V, last = self.vocab_size, params[:, LAST_RANK : LAST_RANK + 1]
        if self._kernels and most > CANDIDATES and len(weights) >= MANY_ROWS:
            from .ranking import keep_ranks

            return keep_ranks(weights, params[:, LAST_RANK], params[:, SHARE], ranked)
        keys = torch.add(self._names, weights, alpha=1 << self._bits)
        if most <= CANDIDATES:
            best = keys.topk(min(most, V), -1)[0]
            least = self._ends(best, params, None)[0] if nucleus else best.gather(1, last.long())
        elif weights.is_cuda or V <= 8 * CANDIDATES:  # the host does not wait for a GPU to know whether candidates suffice
            least, _ = self._ends(keys.sort(dim=-1, descending=True)[0], params, None)
        else:
            least, enough = self._ends(keys.topk(CANDIDATES, -1)[0], params, weights.sum(-1, keepdim=True))
            (rest,) = torch.where(~enough.squeeze(-1))
            if len(rest):
                least[rest], _ = self._ends(keys[rest].sort(dim=-1, descending=True)[0], params[rest], None)
        return weights.masked_fill_(keys < least, 0)

    def _ends(self, ranked: Tensor, params: Tensor, totals: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of ranked keys [R,C]: the last one that is kept, and whether no later one is: both [R,1].

        totals : Tensor, optional
            Sums of all weights [R,1], for rows whose top k is not among the ranked. None if there are no such rows.
        """
        C = ranked.shape[1]
        last, share = params[:, LAST_RANK : LAST_RANK + 1], params[:, SHARE : SHARE + 1]
        within = last < C
        weights = (ranked >> self._bits).add_(1 << 43).mul_(self._ranks[:C] <= last)
        sums = weights.cumsum(-1)
        total = sums[:, -1:]
        limit = share * (total if totals is None else torch.where(within, total, totals))
        end = torch.minimum((sums - weights < limit)[:, 1:].sum(-1, keepdim=True), last)
        enough = within if totals is None else within | ((last == self.vocab_size - 1) & (total >= limit))
        return ranked.gather(1, end.long()), enough


def _penalised(logits: Tensor, seen: Tensor, params: Tensor, needs: int) -> Tensor:
    if needs & REPEATED:
        factor = params[:, REPETITION : REPETITION + 1]
        logits = torch.where(seen > 0, torch.where(logits > 0, logits / factor, logits * factor), logits)
    if needs & COUNTED:
        counts = seen >> 1
        penalties = (counts > 0) * params[:, PRESENCE : PRESENCE + 1]
        logits = logits.sub_(penalties.add_(counts * params[:, FREQUENCY : FREQUENCY + 1]))
    return logits


def _weights(logits: Tensor, largest: Tensor, scale: Tensor | None = None) -> Tensor:
    """exp((logit - largest) / scale) as whole numbers of 1 / ONE: int64 [R,V]. At least 1 of a row is ONE."""
    scaled = logits - largest.double()
    if scale is not None:
        scaled = scaled.div_(scale)
    return scaled.exp_().mul_(ONE).long()


def logprobs_of(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """For rows of logits [R,V] and tokens [R]: the log probability, those of the ``most`` best tokens, and these: float64 [R,1+2*most]."""
    largest = logits.amax(-1, keepdim=True)
    total = _weights(logits, largest).sum(-1, keepdim=True)  # of whole numbers: torch's log_softmax depends on the other rows
    scores = (logits - largest.double()).sub_(torch.log(total / ONE)).float()
    V = scores.shape[1]
    if most:  # among equal scores, what topk takes depends on how many are wanted; keys are all different
        keys = scores.abs().view(torch.int32).long().mul_(-(1 << V.bit_length())).sub_(torch.arange(V, device=scores.device))
        names = keys.topk(min(most, V), -1)[1]
    else:
        names = tokens.new_empty(len(tokens), 0)
    return torch.cat([scores.gather(1, torch.cat([tokens[:, None], names], 1)).double(), names.double()], 1)


def to_logprobs(tokens: Items[int], found: ToHost, wanted: Items[int | None]) -> list[TokenLogprobs | None]:
    """The same for callers; row r gets its ``wanted[r]`` best tokens, or None."""
    result: list[TokenLogprobs | None] = []
    for token, values, most in zip(tokens, found.tolist(), wanted):
        if most is None:
            result.append(None)
            continue
        names = values[1 + len(values) // 2 :]
        result.append(TokenLogprobs(token, values[0], tuple(zip(map(int, names[:most]), values[1:]))))
    return result
