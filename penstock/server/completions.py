"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from ..engine import Event
from ..engine.request import Logprobs, PromptLogprobs
from ..models.tokenizer_json import LONGEST
from .caller import current
from .generation import Generation, Job, finish_reason
from .limits import parsed
from .logprobs import PIECE, CompletionWriter, echoed_begin, prompt_json, shortened
from .protocol import CompletionAnswer, CompletionBody, CompletionChoice, StreamOptions
from .saving import keep_states, state_of
from .service import Service
from .streaming import EventStream, encoded
from .texts import Texts
from .writing import OF_TEXT, answered, prompt_size, written

FUNCTION = "completions"
OF_TOKEN, OF_TOP = 40, 30
"""Bytes of log probabilities: ``"ab", -1.2345678901, {}, 123456`` and ``"ab": -1.2345678901``."""
MANY = 4096
"""Numbers of log probabilities of an echo that a worker process writes to a stream: in a few milliseconds."""


async def completions(service: Service, request: Request) -> Response:
    """Answer a request."""
    body = await parsed(request, CompletionBody, FUNCTION, service.limits, service.processes)
    service.check_model(body.model)
    jobs = await _jobs(service, body)
    size = _size(body, jobs)
    service.check_answer(FUNCTION, size)
    generation = await service.start(jobs, FUNCTION)
    heading = service.heading("cmpl")
    if body.stream:
        writer = StreamWriter(service, body, generation, heading)
        return EventStream(generation, writer, service.metrics, service.limits.seconds, body)
    with closing(generation):
        await generation.finish()
        collected = await service.workers.run(_collected, service, body, generation, heading)
        current().size = size if body.echo or (body.logprobs, body.prompt_logprobs) != (None, None) else 0
        content = await service.work(_written, service.texts, *collected, body.logprobs, body.prompt_logprobs, body.echo)
        return Response(content, media_type="application/json")


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
            tokens, text = await service.tokens(prompt, "prompt", state=state), prompt
        else:
            tokens, text = prompt, await service.text(prompt, "prompt", state) if body.echo else ""
        jobs.append(Job(tokens, params, text, state=state))
    return jobs


@dataclass(frozen=True)
class Scores:
    """Log probabilities of one completion, and of its prompt."""

    prompt: PromptLogprobs | None
    logprobs: Logprobs
    tokens: list[int]
    before: Sequence[int]
    """The last tokens before the text of the answer."""
    begin: int
    """What the text has at its begin beside its tokens."""


def _collected(
    service: Service, body: CompletionBody, generation: Generation, heading: dict[str, Any]
) -> tuple[CompletionAnswer, list[CompletionChoice], list[Scores]]:  # fmt: skip
    """The answer without its choices, its choices without log probabilities, and these. States are written to files."""
    choices, scores = list[CompletionChoice](), list[Scores]()
    for one, job in zip(generation.requests, generation.jobs):
        for done in one.result.completions:
            text = (job.text if body.echo else "") + done.text
            choices.append(CompletionChoice(index=len(choices), text=text, finish_reason=finish_reason(done.finish_reason)))
            begin = echoed_begin(service.tokenizer, job.text, one.prompt) if body.echo else 0
            scores.append(Scores(one.result.prompt_logprobs, done.logprobs, done.tokens, _before(one.prompt, body.echo), begin))
    keep_states(service, choices, generation)
    return CompletionAnswer(**heading, usage=generation.usage()), choices, scores


def _before(prompt: Sequence[int], echo: bool) -> Sequence[int]:
    """The last tokens before the text of an answer, which begins with the prompt if there is an echo."""
    return () if echo else prompt[-LONGEST:]


def _written(
    texts: Texts, answer: CompletionAnswer, choices: list[CompletionChoice], scores: list[Scores], most: int | None,
    of_prompt: int | None, echo: bool,
) -> bytes:  # fmt: skip
    """The answer as JSON. With log probabilities of a long prompt that takes seconds.

    most : int, optional
        Likely tokens of each log probability.
    of_prompt : int, optional
        Likely tokens of each in ``prompt_logprobs``.
    """
    listed = []
    for choice, found in zip(choices, scores):
        more, given = "null", found.prompt
        if most is not None:
            begin = [] if given is None or not echo else shortened(given, most)
            tokens = [] if given is None else given.prompt[: len(begin)]
            writer = CompletionWriter(texts.tokenizer, found.before, found.begin)
            more = writer.to_json([*begin, *found.logprobs], [*tokens, *found.tokens])
        listed.append(written(choice, logprobs=more, **prompt_json(texts.tokenizer, given, of_prompt)))
    return answered(answer, listed)


def _size(body: CompletionBody, jobs: list[Job]) -> int:
    """Bytes of the answer, about."""
    size = 0
    for job in jobs:
        size += (len(job.text.encode(errors="replace")) if body.echo else 0) + OF_TEXT * body.max_tokens
        if body.logprobs is not None:
            size += (body.max_tokens + body.echo * len(job.tokens)) * (OF_TOKEN + OF_TOP * body.logprobs)
        size += prompt_size(len(job.tokens), body.prompt_logprobs)
    return body.n * size


def _echo(writer: CompletionWriter, index: int, text: str, known: PromptLogprobs) -> Iterator[CompletionChoice]:
    """A prompt with its log probabilities, in pieces."""
    for n in range(0, len(known), PIECE):
        logprobs = writer.write(known[n : n + PIECE], known.prompt[n : n + PIECE])
        yield CompletionChoice(index=index, text="" if n else text, logprobs=logprobs)


def _written_echo(texts: Texts, heading: dict[str, Any], index: int, text: str, known: PromptLogprobs) -> bytes:
    """The same as events of a stream."""
    writer = CompletionWriter(texts.tokenizer, begin=echoed_begin(texts.tokenizer, text, known.prompt))
    choices = _echo(writer, index, text, known)
    return b"".join(encoded(CompletionAnswer(**heading, choices=[one])) for one in choices)


class StreamWriter:
    """Pieces of a streamed answer."""

    def __init__(self, service: Service, body: CompletionBody, generation: Generation, heading: dict[str, Any]) -> None:
        self._service, self._body, self._generation, self._heading = service, body, generation, heading
        self._writers: dict[int, CompletionWriter] = {}

    def write(self, event: Event) -> Iterator[CompletionAnswer | Awaitable[bytes]]:
        """The piece of an event. An echo comes before the first one."""
        first = event.index not in self._writers
        place = event.index // self._generation.n
        if first:
            tokenizer, prompt = self._service.tokenizer, self._generation.requests[place].prompt
            begin = echoed_begin(tokenizer, self._generation.jobs[place].text, prompt) if self._body.echo else 0
            self._writers[event.index] = CompletionWriter(tokenizer, _before(prompt, self._body.echo), begin)
        writer, wanted = self._writers[event.index], self._body.logprobs is not None
        if first and self._body.echo:
            text, known = self._generation.jobs[place].text, self._generation.requests[place].result.prompt_logprobs
            if known is None or not wanted:
                yield self._piece(CompletionChoice(index=event.index, text=text, logprobs=writer.write([], []) if wanted else None))
            elif len(known.rows) < MANY or (self._body.stream_options or StreamOptions()).continuous_usage_stats:
                for choice in _echo(writer, event.index, text, known):
                    yield self._piece(choice)
            else:
                yield self._echo_by_process(writer, event.index, text, known)
        logprobs = writer.write(event.logprobs, event.tokens) if wanted else None
        yield self._piece(
            CompletionChoice(index=event.index, text=event.text, logprobs=logprobs, finish_reason=finish_reason(event.finish_reason))
        )  # fmt: skip

    async def _echo_by_process(self, writer: CompletionWriter, index: int, text: str, known: PromptLogprobs) -> bytes:
        found = await self._service.processes.run(_written_echo, self._service.texts, self._heading, index, text, known)
        await self._service.workers.run(writer.skip, known.prompt)
        return found

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
