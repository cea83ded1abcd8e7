"""One step: schedule, run, process. Also the end, failure and cancellation of requests."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from itertools import repeat
from time import perf_counter
from typing import Any

from ..errors import EngineError, OutOfMemory, PenstockError, RangeError, described
from ..models.tokenizers import ends_of, special_tokens_of
from .choosing import NO_TOKEN
from .entry import Entry
from .kept import KeptState
from .minimum import constraint_of
from .pace import Pace
from .references import References
from .request import Event, FinishReason, PromptLogprobs, Request, Sequence, TokenLogprobs
from .runner import Flight, Runner
from .scheduler import Plan, Scheduler
from .scoring import add_rows, to_logprobs
from .slot_tables import Row
from .state_cache import StateCache
from .state_pool import StatePool, is_out_of_memory
from .text import text_stream

TURN = 512
"""Prompt tokens that a client gets per turn, if the prompt budget adapts."""


class Steps:
    """The state of an engine and its transitions. Not thread-safe: ``Engine`` holds a lock.

    overlap : bool
        Launch a step before the tokens of the previous one are known on the host, so the device never waits for Python. A sequence that
        turns out to be finished has computed one token too many, which is dropped.
    prompt_budget : int, optional
        As for ``Scheduler``. None: adapted by ``Pace``.
    canonical : bool
        As for ``Scheduler``.
    """

    def __init__(
        self, runner: Runner, pool: StatePool, cache: StateCache, *, token_budget: int, prompt_budget: int | None, keep_every: int,
        overlap: bool, canonical: bool, tokenizer: Any, model_hash: Any,
    ) -> None:  # fmt: skip
        self.runner, self.pool, self.cache, self.tokenizer = runner, pool, cache, tokenizer
        self.keep_every, self.overlap = keep_every, overlap
        self.entry = Entry(pool, cache, keep_every, model_hash)
        self.pace = Pace(token_budget) if prompt_budget is None else None
        turn = prompt_budget or TURN
        self.scheduler = Scheduler(pool, token_budget, turn, self._admit, self.entry.preempt, canonical, pool.pages is not None)
        self._ended = 0.0
        """The time when the last step ended."""
        self.ends, self.special = ends_of(tokenizer), special_tokens_of(tokenizer)
        self.requests: set[Request] = set()
        self.prompt_tokens = self.generated_tokens = self.steps = 0
        self._flight: Flight | None = None
        self.references = None if pool.pages is None else References(pool.pages, cache, self.requests, lambda: self._flight)
        self._events: deque[tuple[Request, Event]] = deque()
        """Events for sinks, in order."""
        self.telling = False
        """Whether a sink is being called."""

    def add(self, request: Request) -> None:
        """Accept a request. If its decoders cannot be created, it fails."""
        self.requests.add(request)
        params, tokenizer = request.params, self.tokenizer
        stops = {self.special[text]: text for text in (*params.stop, *params.late_stop) if text in self.special}
        try:
            if params.constraint is not None:
                for constraint in request.constraints:
                    _check_mask(constraint)
            for index in range(params.n):
                decoder = None if tokenizer is None else tokenizer.stream(request.prompt)
                text = None if decoder is None else text_stream(decoder, params)
                one = Sequence(request, index, list(request.prompt), stops=stops, text=text)
                one.constraint = constraint_of(one, self.ends, self.runner.sampler.vocab_size)
                one.row = Row.of(one)
                request.sequences.append(one)
        except Exception as error:
            self._fail([request], error)
        else:
            self.scheduler.add(request.sequences[0])

    def cancel(self, request: Request) -> None:
        """End a request now. Ignores requests that are done or of another engine."""
        if request in self.requests:
            self._end(request, "cancelled")

    def tell(self) -> None:
        """Call sinks for all events so far, in order. No step is half processed at this point, so a sink may call the engine."""
        if self.telling:
            return
        self.telling = True
        try:
            while self._events:
                request, event = self._events.popleft()
                assert request.sink is not None
                try:
                    request.sink(request, event)
                except Exception as error:
                    self._fail([request], error)
        finally:
            self.telling = False

    def drain(self) -> None:
        """Process the step in flight, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._guarded(flight)

    def step(self) -> bool:
        """Run one step. Returns whether there was anything to do."""
        if self._flight is not None and any([one.needs_values and one.pending for one in self.scheduler.running]):
            self.drain()
        plan = Plan()
        try:
            if self.pace is not None:
                self.scheduler.prompt_budget = self.pace.next()
            plan, begun = self.scheduler.schedule(), perf_counter()
            flight = self.runner.launch(plan) if plan.works else None
            if flight is not None:
                flight.begun, flight.beside = begun, plan.tokens - plan.decodes if plan.decodes else None
            for work in plan.works[plan.decodes :]:
                work.sequence.saved = None  # the logits were needed until now
            self.entry.trim(plan)
            self.steps += flight is not None
        except BaseException as error:
            flight = None
            self._fail_step(plan, error)
            if not isinstance(error, Exception):  # KeyboardInterrupt
                raise
        before, self._flight = self._flight, flight
        if before is not None:
            self._guarded(before)
        if not self.overlap:
            self.drain()
        return before is not None or bool(plan.works or plan.admitted)

    def past_prompt(self, request: Request, index: int) -> Sequence:
        """The sequence of a completion that runs. Raises EngineError for others. Call ``drain`` before."""
        ours = request in self.requests  # the slot of a request of another engine holds another sequence here
        one = request.sequences[index] if ours and index < len(request.sequences) else None
        if one is None or one.slot is None or one.computed < len(request.prompt):
            rule = "must be running in this engine and past its prompt"
            remedy = "For a finished one, set keep_state in its SamplingParams."
            raise EngineError(f"state_of: completion {index} {rule}, got one that is not. {remedy}")
        return one

    def _admit(self, one: Sequence) -> None:
        """Start a sequence in its slot. If its state cannot be written, its request fails."""
        try:
            self.prompt_tokens += self.entry.begin(one)
        except Exception as error:
            self._fail([one.request], self._described(error, 0))

    # results of a step

    def _guarded(self, flight: Flight) -> None:
        """Process a step. If the device reports an error only now, the step's unfinished requests fail."""
        try:
            self._process(flight)
            ended = perf_counter()
            if self.pace is not None and flight.beside is not None:
                self.pace.measured(flight.beside, ended - max(flight.begun, self._ended))
            self._ended = ended
        except BaseException as error:
            left = dict.fromkeys(work.sequence.request for work in flight.works if not work.sequence.finished)
            self._fail(left, self._described(error, len(flight.works)))
            if not isinstance(error, Exception):
                raise

    def _process(self, flight: Flight) -> None:
        tokens = [] if flight.tokens is None else flight.tokens.tolist()
        logprobs: Iterable[TokenLogprobs | None] = repeat(None)
        if flight.logprobs is not None:
            logprobs = to_logprobs(tokens, flight.logprobs, [work.sequence.request.params.logprobs for work in flight.sampled])
        for work, scores in flight.prompt_logprobs:
            try:
                self._add_prompt_logprobs(work.sequence, work.begin, work.end, scores)
            except Exception as error:
                self._fail([work.sequence.request], error)
        for request, length, state in flight.forks:
            self._fork(request, length, state)
        for work, token, logprob in zip(flight.sampled, tokens, logprobs):
            one = work.sequence
            if one.finished:
                continue
            one.pending -= 1
            try:
                self._accept(one, token, logprob)
            except Exception as error:
                self._fail([one.request], error)
        for one, length, state in flight.kept:
            if length > len(one.tokens):  # the last token has no value because the request failed
                continue
            self.cache.insert(one.tokens[:length], state, one.request.space)
            if length % self.keep_every == 0:
                one.cuts.add(length + self.keep_every)
        for work in flight.works:
            one = work.sequence
            if not work.sample and not one.finished and one.request.params.max_tokens == 0 and work.end == one.length:
                self._end_scored(one)

    def _end_scored(self, one: Sequence) -> None:
        """End a request without new tokens after its prompt: its other completions have no sequences of their own."""
        try:
            params = one.request.params
            text = self.tokenizer.decode(one.request.prompt) if params.echo and self.tokenizer is not None else ""
            state = self.entry.state_of(one) if params.keep_state else None
            for other in one.request.sequences:
                one.request.result.completions[other.index].state = state
                self._emit(other, (), text, (), "length")
        except Exception as error:
            self._fail([one.request], error)

    def _fork(self, request: Request, length: int, state: KeptState) -> None:
        """Queue the other completions of a request, with the state after the prompt."""
        for one in request.sequences[1:]:
            if not one.finished:
                one.saved, one.sample_only, one.computed, one.aligned = state, True, len(request.prompt), length
                one.cuts = request.sequences[0].cuts
                self.scheduler.add(one, like=request.sequences[0])

    def _accept(self, one: Sequence, token: int, logprob: TokenLogprobs | None) -> None:
        """Take a sampled token: text, reasons to end, the event."""
        if token == NO_TOKEN:
            state = one.request.state
            if state is not None and not self.entry.computed(state):
                rule = "such that a token may follow: its logits finite, one of them at least"
                got = f"one with NaN, inf or none after {len(one.tokens)} tokens"
                raise RangeError(f"submit: state must be {rule}, got {got}. Continue from another state, or from its text.")
            rule = "a finite largest value among the tokens that may follow"
            raise EngineError(f"engine: logits must have {rule}, got NaN, inf or none after {len(one.tokens)} tokens. Check the weights.")
        self.generated_tokens += 1
        params, text = one.request.params, ""
        one.tokens.append(token)
        ends = False
        if one.constraint is not None:
            ends = one.constraint.accept(token)
            if not ends:
                _check_mask(one.constraint)
        reason: FinishReason | None = "stop" if ends else None
        if token in params.stop_ids or token in one.stops or (token in self.ends and not params.ignore_end):
            reason = "stop"
            one.completion.stopped_by = one.stops.get(token, token if token in params.stop_ids else None)
        else:
            if one.text is not None:
                text = one.text.push(token)
                if one.text.stopped:
                    reason = "stop"
            if reason is None and len(one.tokens) >= one.most:
                reason = "length"
        if reason is not None and one.text is not None:
            text += one.text.finish()
            if one.text.stopped:
                reason, one.completion.stopped_by = "stop", one.text.stopped_by
            elif params.include_stop:
                text += one.stops.get(token, "")
        if params.echo and self.tokenizer is not None and len(one.tokens) == one.prompt + 1:
            text = self.tokenizer.decode(one.request.prompt) + text
        self._emit(one, (token,), text, () if logprob is None else (logprob,), reason)

    def _emit(
        self, one: Sequence, tokens: tuple[int, ...], text: str, logprobs: tuple[TokenLogprobs, ...], reason: FinishReason | None
    ) -> None:  # fmt: skip
        request, completion = one.request, one.completion
        completion.tokens += tokens
        if text:
            completion.pieces.append(text)
        if logprobs:
            completion.logprobs.extend(logprobs)
        if reason is not None:
            completion.finish_reason = reason
            if request.params.keep_state and completion.state is None:
                completion.state = self.entry.state_of(one)
            self.entry.keep_last(one)
            self.scheduler.remove(one)
            self._close_if_done(request)
        if request.sink is not None:
            self._events.append((request, Event(one.index, tokens, text, logprobs, reason)))

    def _add_prompt_logprobs(self, one: Sequence, begin: int, end: int, scores: Any) -> None:
        result, prompt = one.request.result, one.request.prompt
        rows: array[float] = array("d") if result.prompt_logprobs is None else result.prompt_logprobs.rows
        try:
            likely = add_rows(rows, scores)
        except ValueError:
            rule = f"logits must be numbers, got NaN among those after tokens {begin} to {end - 1}"
            raise EngineError(f"engine: {rule}. Check the weights.") from None
        if result.prompt_logprobs is None:
            result.prompt_logprobs = PromptLogprobs(prompt, rows, likely)

    # ends

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End all completions that still run."""
        for index, completion in enumerate(request.result.completions):
            if completion.finish_reason is None:
                completion.finish_reason = reason
                if index < len(request.sequences):
                    self.scheduler.remove(request.sequences[index])
                if request.sink is not None:
                    self._events.append((request, Event(index, finish_reason=reason)))
        self._close_if_done(request)

    def _close_if_done(self, request: Request) -> None:
        if all(one.finished for one in request.sequences):
            request.done = True
            self.requests.discard(request)

    def _fail(self, requests: Iterable[Request], error: BaseException) -> None:
        for request in requests:
            failed = error if isinstance(error, PenstockError) else None
            if failed is None:
                rule = f"post-processing must not raise, got {type(error).__name__}: {error}"
                failed = EngineError(f"engine: {rule}. Only this request failed.")
                failed.__cause__ = error
            request.result.error = failed
            if not request.done:
                self._end(request, "error")

    def _fail_step(self, plan: Plan, error: BaseException) -> None:
        """Fail the requests of a failed step and free their slots, because their rows are undefined. Other requests continue."""
        sequences = [work.sequence for work in plan.works] or [*self.scheduler.running]
        self._fail(dict.fromkeys(one.request for one in sequences), self._described(error, plan.tokens))

    def _described(self, error: BaseException, tokens: int) -> PenstockError:
        if is_out_of_memory(error):
            failed: EngineError = OutOfMemory(
                f"engine: a step of {tokens} tokens must fit into memory, got {type(error).__name__}. "
                "Lower token_budget, slots or cache_bytes."
            )
        else:
            got = f"{type(error).__name__}: {error}".rstrip(".")
            failed = EngineError(f"engine: a step must run, got {got}. The requests of this step failed.")
        failed.__cause__ = error
        return failed


def _check_mask(constraint: Any) -> None:
    """Raise EngineError for a mask that a step cannot read: all requests of the step would fail."""
    if not isinstance(constraint.mask, bytes | bytearray):
        raise EngineError(f"engine: the mask of a constraint must be bytes, got {described(constraint.mask)}. Only this request failed.")
