"""From one HTTP request to requests of the engine, and back to their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ..engine import Engine, Event, SamplingParams, SequenceState
from ..engine.request import Request
from .caller import current
from .errors import Refused, refusal
from .metrics import Metrics
from .protocol import FinishReason, PromptDetails, Usage


@dataclass(frozen=True)
class Job:
    """One prompt."""

    tokens: list[int]
    params: SamplingParams
    text: str = ""
    """What an echo shows."""
    state: SequenceState | None = None


class Generation:
    """The requests of the engine that belong to one HTTP request. ``close`` cancels what still runs.

    Completion j of prompt i has the index i * n + j. Raises QueueFull and InvalidArgument.
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
        self._expired, caller = False, current()
        queue: Any = {
            "cache_salt": caller.salt, "share": caller.share, "tuning": caller.tuning,
            "priority": -caller.priority,  # the engine runs higher ones first
        }  # fmt: skip
        with ExitStack() as left:
            mailbox = left.enter_context(self._engine.mailbox())
            left.callback(self.cancel)
            for place, job in enumerate(self.jobs):
                base = place * self.n

                def sink(request: Request, event: Event, base: int = base) -> None:
                    if base:
                        event = Event(base + event.index, event.tokens, event.text, event.logprobs, event.finish_reason)
                    mailbox.put(request, event)

                self.requests.append(
                    self._engine.submit(job.tokens, job.params, state=job.state, sink=sink, **queue)
                )  # fmt: skip
            timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)
            left.callback(timer.cancel)
            running.add(self)
            left.callback(running.discard, self)
            self._open = left.pop_all()
        self._mailbox = mailbox

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call this by ``close``."""
        self._open.callback(callback)

    def close(self) -> None:
        """Cancel what still runs."""
        self._open.close()

    def cancel(self) -> None:
        """End all completions; ``events`` raises then."""
        for request in self.requests:
            self._engine.cancel(request)

    async def events(self) -> AsyncIterator[list[Event]]:
        """Events of all completions, in batches as they arrive, until all have ended. Raises Refused if one ends without a result."""
        left = len(self.jobs) * self.n
        began = perf_counter()
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

    def _reason(self, request: Request) -> Refused:
        if request.result.error is not None:
            return refusal(request.result.error)
        if self._expired:
            message = f"server: a request must end within {self._seconds:g} seconds, got one that did not. Ask for fewer tokens."
            return Refused(504, message, kind="server_error", code="timeout")
        return Refused(503, "server: it must be running, got a shutdown.", kind="server_error", code="shutting_down")


def joined(events: Sequence[Event]) -> list[Event]:
    """One event for each completion: a server that is behind sends fewer and longer pieces.

    >>> [event.text for event in joined([Event(0, text="a"), Event(1, text="x"), Event(0, text="b")])]
    ['ab', 'x']
    """
    found: dict[int, Event] = {}
    for one in events:
        last = found.get(one.index)
        if last is not None:
            one = Event(one.index, last.tokens + one.tokens, last.text + one.text, last.logprobs + one.logprobs, one.finish_reason)
        found[one.index] = one
    return list(found.values())


def finish_reason(reason: str | None) -> FinishReason | None:
    """OpenAI's name of a reason; the others end a request with an error."""
    return "stop" if reason == "stop" else "length" if reason == "length" else None
