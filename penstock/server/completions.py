"""``/v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from fastapi import Request, Response

from ..engine import Event
from ..engine.request import Request as EngineRequest
from .generation import Generation, Job, finish_reason
from .limits import parsed
from .logprobs import CompletionWriter, prompt_logprobs, shortened
from .protocol import CompletionAnswer, CompletionBody, CompletionChoice
from .saving import keep_states, state_of
from .service import Service
from .streaming import EventStream, finished

FUNCTION = "completions"
PIECE = 256
"""So many log probabilities of a prompt are in one piece of a stream: they take milliseconds, in which nothing else is answered."""


async def completions(service: Service, request: Request) -> Response:
    """Answer a request."""
    body = await parsed(request, CompletionBody, FUNCTION, service.limits)
    service.check_model(body.model)
    generation = service.start(await _jobs(service, body), FUNCTION)
    heading = service.heading("cmpl")
    if body.stream:
        writer = StreamWriter(service, body, generation, heading)
        return EventStream(generation, writer, service.metrics, service.limits.seconds, body)
    with closing(generation):
        if not await finished(request, generation, service.metrics):
            return Response(status_code=499)
        return await asyncio.to_thread(_answer, service, body, generation, heading)


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
    choices = [
        _choice(service, body, one, place * body.n + index, generation.jobs[place].text, index)
        for place, one in enumerate(generation.requests)
        for index in range(body.n)
    ]
    keep_states(service, choices, generation)
    answer = CompletionAnswer(**heading, choices=choices, usage=generation.usage())
    return Response(answer.model_dump_json(), media_type="application/json")


def _choice(service: Service, body: CompletionBody, one: EngineRequest, place: int, prompt: str, index: int) -> CompletionChoice:
    done = one.result.completions[index]
    choice = CompletionChoice(index=place, text=(prompt if body.echo else "") + done.text, finish_reason=finish_reason(done.finish_reason))
    choice.prompt_logprobs = prompt_logprobs(service.tokenizer, one.result.prompt_logprobs, body.prompt_logprobs)
    if body.logprobs is not None:
        writer = CompletionWriter(service.tokenizer)
        begin = shortened(one.result.prompt_logprobs or [], body.logprobs) if body.echo else []
        choice.logprobs = writer.write([*begin, *done.logprobs], [*one.prompt[: len(begin)], *done.tokens])
    return choice


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
