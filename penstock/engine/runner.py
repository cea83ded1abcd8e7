"""One packed forward pass per step, and one sampled token for each row that needs one."""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..layers.adapted import NONE, chosen
from ..layers.modes import rows_alike
from ..models import CausalLM
from .graphs import Batch, StepGraphs, with_sampled
from .invariance import padding
from .kept import KeptState
from .request import CHUNK, Request, Sequence
from .sampler import Sampler
from .scheduler import Plan, Work
from .scoring import logprobs_of
from .state_pool import StatePool
from .transfer import ToHost, to_device


@dataclass(eq=False)
class Flight:
    """A step whose results may still be computed on the device."""

    works: list[Work]
    sampled: list[Work]
    """The works that get a token, in the order of ``tokens``."""
    tokens: ToHost | None = None
    """int64 [R]; ``choosing.NO_TOKEN`` for rows without a finite largest logit."""
    logprobs: ToHost | None = None
    """``scoring.logprobs_of``"""
    prompt_logprobs: list[tuple[Work, ToHost]] = field(default_factory=list)
    kept: list[tuple[Sequence, int, KeptState]] = field(default_factory=list)
    """States for the cache, and the number of tokens of their prefixes."""
    forks: list[tuple[Request, int, KeptState]] = field(default_factory=list)
    """Requests with several completions whose prompt is done, with the length and the state of their aligned row."""
    begun: float = 0.0
    """The time of the launch."""
    beside: int | None = None
    """The number of prompt tokens in a step with streams. None: this step has no streams."""


class Runner:
    """Runs steps of a model over a pool.

    block : int
        Above 0, results do not depend on the number of tokens, to the bit. Above 1, the number of tokens is padded to a multiple of it
        with a skipped row. See ``invariance.py``.
    adapters : bool
        Whether the model has adapters.
    """

    def __init__(self, model: CausalLM, pool: StatePool, vocab_size: int, block: int = 0, adapters: bool = False) -> None:
        self.model, self.pool, self.block, self._adapters = model, pool, block, adapters
        self.device = pool.memory.device
        self.sampler = Sampler(pool.slots, vocab_size, self.device)
        self.last = self.sampler.last
        """The last sampled token of each slot: the input of a decode row whose token is not known on the host yet."""
        self.graphs: StepGraphs | None = None
        """CUDA graphs of steps; None launches all kernels one by one."""

    @torch.no_grad()
    def launch(self, plan: Plan) -> Flight:
        """Start a step. In stream order, its rows, and the states that it caches, are complete before the next step."""
        decodes, others = plan.works[: plan.decodes], plan.works[plan.decodes :]
        pieces = [work for work in others if work.end > work.begin]
        known = [work for work in others if work.end == work.begin]  # forks and cache hits: their logits are known
        flight = Flight(plan.works, [*decodes, *(work for work in pieces if work.sample), *known])
        logits = None
        if self.pool.pages is not None:
            self.pool.pages.flush()
        if decodes or pieces:
            scored = [work for work in pieces if self._scored(work)]
            with rows_alike() if self.block else nullcontext():
                logits = self._forward(decodes, pieces, last_only=not scored)
            if scored:
                ends = list(accumulate([1] * plan.decodes + [work.end - work.begin for work in pieces]))
                for work in scored:
                    last = ends[plan.decodes + pieces.index(work)]
                    flight.prompt_logprobs.append((work, self._score(logits[last - (work.end - work.begin) : last], work)))
                logits = logits[to_device([end - 1 for end in ends], self.device)]
            self.pool.promote([_slot(work) for work in pieces if work.on_aligned])
            self.pool.align([_slot(work) for work in plan.completing])
            if pieces:
                self._keep(flight, pieces, logits[plan.decodes :])
            for work in plan.completing:
                if work.end in work.sequence.cuts:
                    flight.kept.append((work.sequence, work.end, self.pool.keep(_slot(work), work.end)))
        for work in known:
            one = work.sequence
            if one.index == 0 and one.request.params.n > 1:  # a cache hit
                flight.forks.append((one.request, one.aligned, one.saved))
        if flight.sampled:
            self._sample(flight, decodes, pieces, known, logits)
        return flight

    def _forward(self, decodes: Items[Work], pieces: Items[Work], last_only: bool) -> Tensor:
        """Logits [N,V] after the last token of each work, or [T,V] after all tokens."""
        ids: list[int] = []
        rows, sources = [], []
        for work in decodes:
            one, slot = work.sequence, work.sequence.slot
            assert slot is not None
            rows.append(slot)
            if work.begin < len(one.tokens):
                ids.append(one.tokens[work.begin])
                sources.append(-1)
            else:
                ids.append(0)
                sources.append(slot)
        ends = list(range(len(decodes) + 1))
        for work in pieces:
            slot, known = _slot(work), work.sequence.tokens[work.begin : work.end]
            ids += known
            sources += [-1] * len(known)
            if work.end - work.begin > len(known):
                ids.append(0)
                sources.append(slot)
            ends.append(len(ids))
            rows.append(self.pool.aligned(slot) if work.on_aligned else slot)
        adapters = [_adapter(work) for part in (decodes, pieces) for work in part] if self._adapters else []
        if self.graphs is not None and last_only:
            logits = self.graphs.run(Batch(ids, sources, ends, rows, adapters))
            if logits is not None:
                return logits
        skipped = padding(len(ids), self.block)
        if skipped:
            ids += [0] * skipped
            sources += [-1] * skipped
            more = 1 + -(len(rows) + 1) % self.block  # the head gets one token per row
            ends += [len(ids)] * more
            rows += [-1] * more
            adapters += [NONE] * more if self._adapters else []
        tokens, offsets, slots = (to_device(one, self.device) for one in (ids, ends, rows))
        if max(sources) >= 0:
            tokens = with_sampled(tokens, to_device(sources, self.device), self.last)
        single = last_only and not (pieces or self.block)  # single tokens have kernels of decode steps
        shaped = (tokens[:, None], None) if single else (tokens[None], offsets)
        with self._chosen(Batch(ids, sources, ends, rows, adapters), last_only):
            logits = self.model.advance(shaped[0], self.pool.state, cu_seqlens=shaped[1], slots=slots, last_only=last_only)
        return logits if last_only else logits[0]

    def _chosen(self, batch: Batch, last_only: bool) -> AbstractContextManager[None]:
        """The adapters of a step. The head gets rows with ``last_only``, else tokens."""
        if not self._adapters:
            return nullcontext()
        tokens = to_device(batch.token_adapters(), self.device)
        return chosen(tokens, to_device(batch.adapters, self.device) if last_only else tokens)

    def _keep(self, flight: Flight, pieces: Items[Work], logits: Tensor) -> None:
        """Copy states that are needed later, before the next step changes them. ``logits`` are those of the pieces."""
        for n, work in enumerate(pieces):
            one, slot = work.sequence, _slot(work)
            if work.on_aligned and work.end in one.cuts:
                ends_prompt = work.end == len(one.request.prompt)
                flight.kept.append((one, work.end, self.pool.keep(slot, work.end, logits[n].clone() if ends_prompt else None)))
            if work.sample and one.index == 0 and one.request.params.n > 1 and work.end == len(one.request.prompt):
                flight.forks.append((one.request, one.aligned, self.pool.keep(slot, work.end, logits[n].clone(), live=True)))

    def _sample(self, flight: Flight, decodes: Items[Work], pieces: Items[Work], known: Items[Work], logits: Tensor | None) -> None:
        parts = []
        if logits is not None:
            count = len(decodes) + len(pieces)
            wanted = [*range(len(decodes)), *(n for n, work in enumerate(pieces, len(decodes)) if work.sample)]
            if len(wanted) < count:
                logits = logits[to_device(wanted, self.device)]
            elif logits.shape[0] > count:
                logits = logits[:count]
            parts.append(logits)
        if known:
            stacked = torch.stack([work.sequence.saved.logits for work in known])
            parts.append(stacked if logits is None else stacked.to(logits))
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        rows = [work.sequence.row for work in flight.sampled]
        slots: Any = [work.sequence.slot for work in flight.sampled]
        tokens = self.sampler.sample(logits, rows, slots, [work.end for work in flight.sampled])
        most = max([row.logprobs for row in rows])
        if most >= 0:
            flight.logprobs = ToHost(logprobs_of(logits, tokens.clamp(min=0), most))
        flight.tokens = ToHost(tokens)

    def _scored(self, work: Work) -> bool:
        request = work.sequence.request  # a chunk completed by generated tokens begins in the prompt, which is already scored
        return request.params.prompt_logprobs is not None and work.end <= len(request.prompt)

    def _score(self, logits: Tensor, work: Work) -> ToHost:
        """Log probabilities of the tokens of the prompt that follow those of a piece."""
        params, prompt = work.sequence.request.params, work.sequence.request.prompt
        following = to_device(prompt[work.begin + 1 : work.end + 1], self.device)
        most = params.prompt_logprobs or 0
        pairs = zip(logits[: len(following)].split(CHUNK), following.split(CHUNK))  # bounds the float64 copies in memory to a chunk
        return ToHost(torch.cat([logprobs_of(*pair, most) for pair in pairs]))


def _slot(work: Work) -> int:
    slot = work.sequence.slot
    assert slot is not None
    return slot


def _adapter(work: Work) -> int:
    tuning = work.sequence.request.tuning
    return NONE if tuning is None else int(tuning.adapter)
