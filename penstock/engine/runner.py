"""One packed forward pass a step, and one sample for each row that wants one."""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..layers.linear import rows_alike
from ..models import CausalLM
from .graphs import Batch, StepGraphs, with_sampled
from .invariance import padding
from .request import CHUNK, Request, Sequence
from .sampler import Row, logprobs_of, sample
from .scheduler import Work
from .state_pool import StatePool
from .states import KeptState
from .transfer import ToHost, to_device


@dataclass(eq=False)
class Flight:
    """A step whose results may still be computed on the device."""

    works: list[Work]
    sampled: list[Work]
    """Works that get a token, in the order of ``tokens``."""
    tokens: ToHost | None = None
    """int64 [R]"""
    logprobs: tuple[ToHost, ToHost, ToHost] | None = None
    prompt_logprobs: list[tuple[Work, tuple[ToHost, ToHost, ToHost]]] = field(default_factory=list)
    kept: list[tuple[Sequence, int, KeptState]] = field(default_factory=list)
    """States for the cache, and the number of tokens of their prefixes."""
    forks: list[tuple[Request, int, KeptState]] = field(default_factory=list)
    """Requests with several completions whose prompt is done, and the length and state of their aligned row."""


class Runner:
    """Runs steps of a model over a pool.

    block : int
        The number of tokens of a forward pass is rounded up to a multiple of it, with a row that is skipped. See ``invariance.py``.
    """

    def __init__(self, model: CausalLM, pool: StatePool, vocab_size: int, block: int = 1) -> None:
        self.model, self.pool, self.vocab_size, self.block = model, pool, vocab_size, block
        self.device = pool.memory.device
        self.last = torch.zeros(pool.slots, dtype=torch.int64, device=self.device)
        """The last sampled token of each slot: what a decode row gets while its value is not known on the host."""
        self.graphs: StepGraphs | None = None
        """Of steps; None runs all kernels one by one."""

    @torch.no_grad()
    def launch(self, works: Items[Work]) -> Flight:
        """Start a step. States of its rows, and states that it promises to keep, are in order for the next one."""
        moved = [work for work in works if work.end > work.begin]
        flight = Flight(list(works), [work for work in works if work.sample])
        if moved:
            scored = [work for work in moved if self._scored(work)]
            with rows_alike() if self.block > 1 else nullcontext():
                logits = self._forward(moved, last_only=not scored)
            if scored:
                ends = torch.tensor([work.end - work.begin for work in moved]).cumsum(0)
                for work in scored:
                    last = int(ends[moved.index(work)])
                    flight.prompt_logprobs.append((work, self._score(logits[last - (work.end - work.begin) : last], work)))
                logits = logits[to_device((ends - 1).tolist(), self.device)]
            self.pool.promote([_slot(work) for work in moved if work.on_aligned])
        else:
            logits = torch.empty(0, self.vocab_size, device=self.device)
        self._keep(flight, moved, logits)
        if flight.sampled:
            self._sample(flight, moved, logits)
        return flight

    def _forward(self, works: Items[Work], last_only: bool) -> Tensor:
        """Logits [N,V] after the last token of each work, or [T,V] after all tokens."""
        ids: list[int] = []
        ends, rows, unknown = [0], [], []
        for work in works:
            one, slot = work.sequence, _slot(work)
            if work.end - work.begin == 1 and work.begin < len(one.tokens):
                ids.append(one.tokens[work.begin])
            else:
                ids += one.tokens[work.begin : work.end]
                if work.end > len(one.tokens):
                    unknown.append((len(ids), slot))
                    ids.append(0)
            ends.append(len(ids))
            rows.append(self.pool.aligned(slot) if work.on_aligned else slot)
        sources = [-1] * len(ids)
        for place, slot in unknown:
            sources[place] = slot
        if self.graphs is not None and last_only:
            logits = self.graphs.run(Batch(ids, sources, ends, rows))
            if logits is not None:
                return logits
        skipped = padding(len(ids), self.block)
        if skipped:
            ids += [0] * skipped
            sources += [-1] * skipped
            more = 1 + -(len(rows) + 1) % self.block  # the head gets one token of each row
            ends += [len(ids)] * more
            rows += [-1] * more
        tokens, offsets, slots = (to_device(one, self.device) for one in (ids, ends, rows))
        if unknown:
            tokens = with_sampled(tokens, to_device(sources, self.device), self.last)
        logits = self.model.advance(tokens[None], self.pool.state, cu_seqlens=offsets, slots=slots, last_only=last_only)
        return logits if last_only else logits[0]

    def _keep(self, flight: Flight, works: Items[Work], logits: Tensor) -> None:
        """Copy states that are wanted later, before the next step changes them."""
        for n, work in enumerate(works):
            one, slot = work.sequence, _slot(work)
            if work.on_aligned and work.end in one.cuts:
                ends_prompt = work.end == len(one.request.prompt)
                row = self.pool.copy_out([self.pool.aligned(slot)])
                flight.kept.append((one, work.end, KeptState(row, logits[n].clone() if ends_prompt else None)))
            if work.sample and one.index == 0 and one.request.params.n > 1 and work.end == len(one.request.prompt):
                rows = self.pool.copy_out([self.pool.live(slot), self.pool.aligned(slot)])
                flight.forks.append((one.request, one.aligned, KeptState(rows, logits[n].clone())))
        for work in flight.sampled:
            one = work.sequence
            if work.begin == work.end and one.index == 0 and one.request.params.n > 1:  # a hit of the cache
                flight.forks.append((one.request, one.aligned, one.saved))

    def _sample(self, flight: Flight, moved: Items[Work], logits: Tensor) -> None:
        place = {work: n for n, work in enumerate(moved)}
        kept = [work.sequence.saved.logits for work in flight.sampled if work not in place]  # forks, and hits of the cache
        wanted = [place[work] for work in flight.sampled if work in place]
        if len(wanted) < len(moved):
            logits = logits[to_device(wanted, self.device, torch.int64)]
        elif logits.shape[0] > len(moved):
            logits = logits[: len(moved)]
        if kept:
            logits = torch.cat([logits, torch.stack(kept).to(logits)])
            flight.sampled.sort(key=lambda work: work not in place)
        rows = []
        for work in flight.sampled:
            one = work.sequence
            if one.row is None:
                one.row = Row.of(one)
            one.row.position = work.end
            rows.append(one.row)
        tokens = sample(logits, rows, self.vocab_size)
        self.last[to_device([_slot(work) for work in flight.sampled], self.device)] = tokens
        most = max((row.params.logprobs if row.params.logprobs is not None else -1 for row in rows), default=-1)
        if most >= 0:
            own, names, best = logprobs_of(logits, tokens, most)
            flight.logprobs = ToHost(own), ToHost(names), ToHost(best)
        flight.tokens = ToHost(tokens)

    def _scored(self, work: Work) -> bool:
        return work.sequence.request.params.prompt_logprobs is not None and work.begin < len(work.sequence.request.prompt)

    def _score(self, logits: Tensor, work: Work) -> tuple[ToHost, ToHost, ToHost]:
        """Log probabilities of the tokens of the prompt that follow those of a piece."""
        params, prompt = work.sequence.request.params, work.sequence.request.prompt
        following = to_device(prompt[work.begin + 1 : work.end + 1], self.device, torch.int64)
        most = params.prompt_logprobs or 0
        pairs = zip(logits[: len(following)].split(CHUNK), following.split(CHUNK))  # float64 copies of a chunk only are in memory
        own, names, best = zip(*(logprobs_of(*pair, most) for pair in pairs))
        return ToHost(torch.cat(own)), ToHost(torch.cat(names)), ToHost(torch.cat(best))


def _slot(work: Work) -> int:
    slot = work.sequence.slot
    assert slot is not None
    return slot
