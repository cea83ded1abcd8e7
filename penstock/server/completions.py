"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from fastapi import Request, Response

from ..engine import Event
from ..engine.request import Completion
from ..engine.request import Request as EngineRequest
from .generation import Generation, Job, finish_reason
from .limits import parsed
from .logprobs import PIECE, CompletionWriter, prompt_json, shortened
from .protocol import CompletionAnswer, CompletionBody, CompletionChoice
from .saving import keep_states, state_of
from .service import Service
from .streaming import EventStream, finished
from .writing import OF_TEXT, answered, prompt_size, written

FUNCTION = "completions"
OF_TOKEN, OF_TOP = 40, 30
"""Bytes of log probabilities: ``"ab", -1.2345678901, {}, 123456`` and ``"ab": -1.2345678901``."""


async def completions(service: Service, request: Request) -> Response:
    """Answer a request."""
    body = await parsed(request, CompletionBody, FUNCTION, service.limits, service.workers)
    service.check_model(body.model)
    jobs = await _jobs(service, body)
    service.check_answer(FUNCTION, _size(body, jobs))
    generation = await service.start(jobs, FUNCTION)
    heading = service.heading("cmpl")
    if body.stream:
        writer = StreamWriter(service, body, generation, heading)
        return EventStream(generation, writer, service.metrics, service.limits.seconds, body)
    with closing(generation):
        if not await finished(request, generation, service.metrics):
            return Response(status_code=499)
        return await service.workers.run(_answer, service, body, generation, heading)


async def _jobs(service: Service, body: CompletionBody) -> list[Job]:
    prompts = body.prompts
    state = await state_of(service, body, FUNCTION, len(prompts))
    params = await service.params(
        body, FUNCTION, body.max_tokens, logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None,
        keep_state=body.save_state,
    )  # fmt: skip
    jobs = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens, text = await service.tokens(prompt, "prompt", special=state is None), prompt
        else:
            tokens, text = prompt, await service.text(prompt, "prompt") if body.echo else ""
        jobs.append(Job(tokens, params, text, state=state))
    return jobs


def _answer(service: Service, body: CompletionBody, generation: Generation, heading: dict[str, Any]) -> Response:
    """The whole answer. Log probabilities of a long prompt take seconds, and states are written to files."""
    choices, more = list[CompletionChoice](), list[dict[str, str]]()
    for one, job in zip(generation.requests, generation.jobs):
        for done in one.result.completions:
            text = (job.text if body.echo else "") + done.text
            choices.append(CompletionChoice(index=len(choices), text=text, finish_reason=finish_reason(done.finish_reason)))
            scores = prompt_json(service.tokenizer, one.result.prompt_logprobs, body.prompt_logprobs)
            more.append({"logprobs": _logprobs(service, body, one, done), **scores})
    keep_states(service, choices, generation)
    answer = CompletionAnswer(**heading, usage=generation.usage())
    return answered(answer, (written(choice, **found) for choice, found in zip(choices, more)))


def _logprobs(service: Service, body: CompletionBody, one: EngineRequest, done: Completion) -> str:
    """As JSON."""
    if body.logprobs is None:
        return "null"
    begin = shortened(one.result.prompt_logprobs or [], body.logprobs) if body.echo else []
    return CompletionWriter(service.tokenizer).to_json([*begin, *done.logprobs], [*one.prompt[: len(begin)], *done.tokens])


def _size(body: CompletionBody, jobs: list[Job]) -> int:
    """Bytes of the answer, about."""
    size = 0
    for job in jobs:
        size += (len(job.text.encode(errors="replace")) if body.echo else 0) + OF_TEXT * body.max_tokens
        if body.logprobs is not None:
            size += (body.max_tokens + body.echo * len(job.tokens)) * (OF_TOKEN + OF_TOP * body.logprobs)
        size += prompt_size(len(job.tokens), body.prompt_logprobs)
    return body.n * size


class StreamWriter:
    """Pieces of a streamed answer."""

    def __init__(self, service: Service, body: CompletionBody, generation: Generation, heading: dict[str, Any]) -> None:
        self._service, self._body, self._generation, self._heading = service, body, generation, heading
        self._writers: dict[int, CompletionWriter] = {}

    def write(self, event: Event) -> Iterator[CompletionAnswer]:
        """The piece of an event. An echo comes before the first one."""
        first = event.index not in self._writers
        writer = self._writers.setdefault(event.index, CompletionWriter(self._service.tokenizer))
        wanted = self._body.logprobs is not None
        if first and self._body.echo:
            place = event.index // self._generation.n
            prompt, known = self._generation.requests[place].prompt, self._generation.requests[place].result.prompt_logprobs or []
            for n in range(0, max(1, len(known)), PIECE):
                text = "" if n else self._generation.jobs[place].text
                logprobs = writer.write(known[n : n + PIECE], prompt[n : n + PIECE]) if wanted else None
                yield self._piece(CompletionChoice(index=event.index, text=text, logprobs=logprobs))
        logprobs = writer.write(event.logprobs, event.tokens) if wanted else None
        yield self._piece(
            CompletionChoice(index=event.index, text=event.text, logprobs=logprobs, finish_reason=finish_reason(event.finish_reason))
        )  # fmt: skip

    def _piece(self, choice: CompletionChoice) -> CompletionAnswer:
        return CompletionAnswer(**self._heading, choices=[choice])

    def finish(self) -> Iterator[CompletionAnswer]:
        """States and counts of tokens, if they are wanted. Saving states takes time."""
        if self._body.save_state:
            choices = [CompletionChoice(index=index) for index in range(len(self._generation.jobs) * self._generation.n)]
            keep_states(self._service, choices, self._generation)
            yield CompletionAnswer(**self._heading, choices=choices)
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield CompletionAnswer(**self._heading, choices=[], usage=self._generation.usage())
