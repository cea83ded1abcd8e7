"""``/v1/chat/completions``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from fastapi import Request, Response

from ..engine import Event
from ..engine.request import Logprobs, PromptLogprobs
from .answers import AnswerForm, AnswerReader, Piece, read_answer
from .caller import current
from .conversation import Conversation, prepare
from .generation import Generation, Job, finish_reason
from .limits import parsed
from .logprobs import chat_json, chat_logprobs, prompt_json
from .protocol import ChatAnswer, ChatBody, ChatChoice, ChatChunk, ChatChunkChoice, ChatMessage, Delta, FinishReason
from .saving import continued, keep_states, state_of
from .service import Service
from .streaming import EventStream
from .templates import Template
from .texts import Texts
from .tools import CallAnswer, CallDelta, FunctionAnswer, call_id
from .writing import OF_TEXT, answered, prompt_size, written

FUNCTION = "chat"
OF_TOKEN, OF_TOP = 90, 70
"""Bytes of log probabilities: objects with token, logprob and bytes."""


async def chat(service: Service, request: Request) -> Response:
    """Answer a request."""
    body = await parsed(request, ChatBody, FUNCTION, service.limits, service.processes)
    service.check_model(body.model)
    job, form = await _job(service, service.chat_template(FUNCTION), body)
    size = _size(body, job)
    service.check_answer(FUNCTION, size)
    generation = await service.start([job], FUNCTION)
    heading = service.heading("chatcmpl")
    if body.stream:
        writer = StreamWriter(service, form, body, generation, heading)
        return EventStream(generation, writer, service.metrics, service.limits.seconds, body)
    with closing(generation):
        await generation.finish()
        collected = await service.workers.run(_collected, service, form, body, generation, heading)
        current().size = size if body.logprobs or body.prompt_logprobs is not None else 0
        content = await service.work(_written, service.texts, *collected, body.logprobs, body.prompt_logprobs)
        return Response(content, media_type="application/json")


def _collected(
    service: Service, form: AnswerForm, body: ChatBody, generation: Generation, heading: dict[str, Any]
) -> tuple[ChatAnswer, list[ChatChoice], list[Logprobs], PromptLogprobs | None]:  # fmt: skip
    """The answer without its choices, its choices without log probabilities, and these. States are written to files."""
    choices, (request,) = list[ChatChoice](), generation.requests
    for index, done in enumerate(request.result.completions):
        found = read_answer(form, done.text)
        calls = [CallAnswer(id=call_id(), function=FunctionAnswer(name=name, arguments=text)) for name, text in found.calls]
        content = found.content if found.content or not (calls or found.reasoning) else None
        message = ChatMessage(content=content, reasoning_content=found.reasoning or None, tool_calls=calls or None)
        reason = _reason(finish_reason(done.finish_reason) or "stop", bool(calls) and not found.cut)
        choices.append(ChatChoice(index=index, message=message, finish_reason=reason))
    keep_states(service, choices, generation)
    logprobs = [done.logprobs for done in request.result.completions]
    return ChatAnswer(**heading, usage=generation.usage()), choices, logprobs, request.result.prompt_logprobs


def _written(
    texts: Texts, answer: ChatAnswer, choices: list[ChatChoice], logprobs: list[Logprobs], of_prompt: PromptLogprobs | None,
    wanted: bool, most: int | None,
) -> bytes:  # fmt: skip
    """The answer as JSON. With many log probabilities that takes seconds."""
    listed = (
        written(choice, logprobs=chat_json(texts.tokenizer, found) if wanted else "null") for choice, found in zip(choices, logprobs)
    )  # fmt: skip
    return answered(answer, listed, **prompt_json(texts.tokenizer, of_prompt, most))


def _reason(reason: FinishReason, called: bool) -> FinishReason:
    """Calls are the reason if all of them are whole."""
    return "tool_calls" if called and reason == "stop" else reason


async def _job(service: Service, template: Template, body: ChatBody) -> tuple[Job, AnswerForm]:
    wanted = body.max_completion_tokens or body.max_tokens
    functions = [one.function for one in body.tools]
    state, before = await continued(service, await state_of(service, body, FUNCTION))
    talk = Conversation(
        body.messages, functions, body.tool_choice, body.parallel_tool_calls, body.response_format, body.chat_template_kwargs, before
    )  # fmt: skip
    ready = await prepare(service, template, talk, FUNCTION)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = await service.params(
        body, FUNCTION, wanted or service.limits.max_tokens, ready.stops, logprobs=logprobs, constraint=ready.constraint,
        prelude=ready.prelude, keep_state=body.save_state,
    )  # fmt: skip
    tokens = await service.tokens(ready.prompt, "messages", special=False, state=state)
    known = len(tokens) + (0 if state is None else len(state.tokens))
    return Job(tokens, service.fitting(params, known, wanted), state=state), ready.form


def _size(body: ChatBody, job: Job) -> int:
    """Bytes of the answer, about."""
    most = job.params.max_tokens
    logprobs = 0 if job.params.logprobs is None else most * (OF_TOKEN + OF_TOP * job.params.logprobs)
    return job.params.n * (OF_TEXT * most + logprobs) + prompt_size(len(job.tokens), body.prompt_logprobs)


class StreamWriter:
    """Pieces of a streamed answer."""

    def __init__(self, service: Service, form: AnswerForm, body: ChatBody, generation: Generation, heading: dict[str, Any]) -> None:
        self._service, self._form, self._body, self._generation = service, form, body, generation
        self._heading = heading
        self._readers: dict[int, AnswerReader] = {}
        """Of answers of which a role was sent."""
        self._calls: Counter[int] = Counter()

    def write(self, event: Event) -> Iterator[ChatChunk]:
        """The pieces of an event. A role comes before the first one."""
        if event.index not in self._readers:
            self._readers[event.index] = AnswerReader(self._form)
            yield self._piece(ChatChunkChoice(index=event.index, delta=Delta(role="assistant", content="")))
        reader, reason = self._readers[event.index], finish_reason(event.finish_reason)
        pieces = list(reader.push(event.text))
        if reason is not None:
            pieces += reader.finish()
        deltas = [self._delta(event.index, piece) for piece in pieces] or [Delta()]
        logprobs = chat_logprobs(self._service.tokenizer, event.logprobs) if self._body.logprobs else None
        for at, delta in enumerate(deltas):
            choice = ChatChunkChoice(index=event.index, delta=delta, logprobs=None if at else logprobs)
            if at == len(deltas) - 1 and reason is not None:
                choice.finish_reason = _reason(reason, self._calls[event.index] > 0 and not reader.cut)
            yield self._piece(choice)

    def _delta(self, index: int, piece: Piece) -> Delta:
        if piece.kind == "content":
            return Delta(content=piece.text)
        if piece.kind == "reasoning":
            return Delta(reasoning_content=piece.text)
        self._calls[index] += piece.kind == "call"
        place = self._calls[index] - 1
        if piece.kind == "arguments":
            return Delta(tool_calls=[CallDelta(index=place, function=FunctionAnswer(arguments=piece.text))])
        named = FunctionAnswer(name=piece.text, arguments="")
        return Delta(tool_calls=[CallDelta(index=place, id=call_id(), type="function", function=named)])

    def finish(self) -> Iterator[ChatChunk]:
        """States and counts of tokens, if they are wanted. Saving states takes time."""
        if self._body.save_state:
            choices = [ChatChunkChoice(index=index, delta=Delta()) for index in range(self._generation.n)]
            keep_states(self._service, choices, self._generation)
            yield ChatChunk(**self._heading, choices=choices)
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield ChatChunk(**self._heading, usage=self._generation.usage())

    def _piece(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**self._heading, choices=[choice])
