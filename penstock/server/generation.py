"""From one HTTP request to requests of the engine, and back to their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Any

from ..engine import Engine, Event, SamplingParams, SequenceState
from ..engine.request import Request
from .caller import current
from .errors import Refused, refusal, shutting_down
from .metrics import Metrics
from .protocol import FinishReason, PromptDetails, Usage
from .workers import Workers

FEW_TOKENS = 4096
"""Prompts of more tokens are checked by a worker: 10,000 take a millisecond."""
MOST_JOINED = 4096
"""Log probabilities that are written at once: they take a few milliseconds, in which nothing else is answered."""


@dataclass(frozen=True)
class Job:
    """One prompt."""

    tokens: Sequence[int]
    params: SamplingParams
    text: str = ""
    """What an echo shows."""
    state: SequenceState | None = None


class Generation:
    """The requests of the engine that belong to one HTTP request: ``begin``, then ``events``. ``close`` cancels what still runs.

    Completion j of prompt i has the index i * n + j.
    """

    def __init__(self, engine: Engine, jobs: Sequence[Job], seconds: float, metrics: Metrics, running: set[Generation]) -> None:
        self.jobs, self.requests = jobs, list[Request]()
        self.n = jobs[0].params.n
        self._engine, self._seconds, self._metrics = engine, seconds, metrics
        self.began = perf_counter()
        self.first: float | None = None
        """When the first tokens came."""
        self.last: float | None = None
        """When the last ones came."""
        self._expired = self._cancelled = False
        caller = current()
        self._queue: Any = {
            "cache_salt": caller.salt, "share": caller.share, "tuning": caller.tuning,
            "priority": -caller.priority,  # the engine runs higher ones first
        }  # fmt: skip
        with ExitStack() as left:
            self._mailbox = left.enter_context(self._engine.mailbox())
            left.callback(self.cancel)
            timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)
            left.callback(timer.cancel)
            running.add(self)
            left.callback(running.discard, self)
            self._open = left.pop_all()

    async def begin(self, workers: Workers) -> None:
        """Queue the requests. Checks of long prompts and the first masks of grammars take long, so they are made by workers.

        Raises QueueFull, InvalidArgument or Refused, and closes the generation then.
        """
        self.in_thread = workers.run
        constrained = any(job.params.constraint is not None for job in self.jobs)
        try:
            if constrained or sum(len(job.tokens) for job in self.jobs) > FEW_TOKENS:
                await workers.run(self._submit)
            else:
                self._submit()
        except BaseException:
            self.close()
            raise

    def _submit(self) -> None:
        """In any thread. What is cancelled meanwhile is cancelled here: ``cancel`` sees only requests that are in the list."""
        self._engine.check_queue(self._queue["share"][0], sum(job.params.n for job in self.jobs))  # before any of them is queued
        for place, job in enumerate(self.jobs):
            if self._cancelled:
                raise self._reason(None)
            request = self._engine.submit(job.tokens, job.params, state=job.state, sink=self._sink(place * self.n), **self._queue)
            self.requests.append(request)
            if self._cancelled:
                self._engine.cancel(request)

    def _sink(self, base: int) -> Callable[[Request, Event], None]:
        if not base:
            return self._mailbox.put

        def put(request: Request, event: Event) -> None:
            event = Event(base + event.index, event.tokens, event.text, event.logprobs, event.finish_reason)
            self._mailbox.put(request, event)

        return put

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call this by ``close``."""
        self._open.callback(callback)

    def close(self) -> None:
        """Cancel what still runs."""
        self._open.close()

    def cancel(self) -> None:
        """End all completions; ``events`` raises then."""
        self._cancelled = True
        for request in list(self.requests):
            self._engine.cancel(request)

    async def events(self) -> AsyncIterator[list[Event]]:
        """Events of all completions, in batches as they arrive, until all have ended. Raises Refused if one ends without a result."""
        left = len(self.jobs) * self.n
        began = self.began
        seen: dict[int, float] = {}
        while left:
            events = joined(await self._mailbox.get_all())
            now = perf_counter()
            for event in events:
                if event.finish_reason in ("cancelled", "error"):
                    raise self._reason(self.requests[event.index // self.n])
                if event.tokens:
                    last = seen.get(event.index)
                    self._metrics.tokens(len(event.tokens), now - began, None if last is None else now - last)
                    seen[event.index] = now
                    self.first, self.last = self.first or now, now
                left -= event.finish_reason is not None
            yield events
        self._metrics.finished(now - began)

    async def finish(self) -> None:
        """Wait for the end of all completions."""
        async for _ in self.events():
            pass

    def usage(self, completion: int | None = None) -> Usage:
        """Counts of tokens so far; of completions, that number of them."""
        prompt = sum(len(job.tokens) for job in self.jobs)
        if completion is None:
            completion = sum(len(one.tokens) for request in self.requests for one in request.result.completions)
        cached = sum(request.result.cached_tokens for request in self.requests)
        return Usage(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
        )  # fmt: skip

    def _expire(self) -> None:
        self._expired = True
        self.cancel()

    def _reason(self, request: Request | None) -> Refused:
        if request is not None and request.result.error is not None:
            return refusal(request.result.error)
        if self._expired:
            message = f"server: a request must end within {self._seconds:g} seconds, got one that did not. Ask for fewer tokens."
            return Refused(504, message, kind="server_error", code="timeout")
        return shutting_down()


def joined(events: Sequence[Event]) -> list[Event]:
    """One event for each completion: a server that is behind sends fewer and longer pieces, of at most ``MOST_JOINED`` log probabilities.

    >>> [event.text for event in joined([Event(0, text="a"), Event(1, text="x"), Event(0, text="b")])]
    ['ab', 'x']
    """
    groups: list[list[Event]] = []
    last: dict[int, tuple[list[Event], int]] = {}
    for one in events:
        group, count = last.get(one.index, ([], MOST_JOINED))
        count += sum(1 + len(each.top) for each in one.logprobs)
        if count > MOST_JOINED or not group:
            group, count = [], 0
            groups.append(group)
        group.append(one)
        last[one.index] = group, count
    return [group[0] if len(group) == 1 else _join(group) for group in groups]


def _join(events: list[Event]) -> Event:
    tokens, logprobs = chain.from_iterable(one.tokens for one in events), chain.from_iterable(one.logprobs for one in events)
    return Event(events[0].index, tuple(tokens), "".join(one.text for one in events), tuple(logprobs), events[-1].finish_reason)


def finish_reason(reason: str | None) -> FinishReason | None:
    """OpenAI's name of a reason; the others end a request with an error."""
    return "stop" if reason == "stop" else "length" if reason == "length" else None
