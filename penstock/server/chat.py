"""``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from fastapi import Request, Response

from ..engine import Event
from .generation import Generation, Job, finish_reason
from .limits import parsed
from .logprobs import chat_logprobs, prompt_logprobs
from .protocol import ChatAnswer, ChatBody, ChatChoice, ChatChunk, ChatChunkChoice, ChatMessage, Delta
from .service import Service
from .streaming import EventStream, finished
from .templates import Template

FUNCTION = "chat"


async def chat(service: Service, request: Request) -> Response:
    """Answer a request."""
    body = await parsed(request, ChatBody, FUNCTION, service.limits)
    service.check_model(body.model)
    template = service.chat_template(FUNCTION)
    generation = service.start([await _job(service, template, body)], FUNCTION)
    heading = service.heading("chatcmpl")
    if body.stream:
        writer = StreamWriter(service, template, body, generation, heading)
        return EventStream(generation, writer, service.metrics, service.limits.seconds, body.stream_options)
    with closing(generation):
        if not await finished(request, generation, service.metrics):
            return Response(status_code=499)
        return await asyncio.to_thread(_answer, service, template, body, generation, heading)


def _answer(service: Service, template: Template, body: ChatBody, generation: Generation, heading: dict[str, Any]) -> Response:
    """The whole answer. Log probabilities of many tokens take seconds."""
    choices = []
    for index, done in enumerate(generation.requests[0].result.completions):
        text = done.text.lstrip() if template.strips else done.text
        logprobs = chat_logprobs(service.tokenizer, done.logprobs) if body.logprobs else None
        reason = finish_reason(done.finish_reason) or "stop"
        choices.append(ChatChoice(index=index, message=ChatMessage(content=text), logprobs=logprobs, finish_reason=reason))
    scores = prompt_logprobs(service.tokenizer, generation.requests[0].result.prompt_logprobs, body.prompt_logprobs)
    answer = ChatAnswer(**heading, choices=choices, usage=generation.usage(), prompt_logprobs=scores)
    return Response(answer.model_dump_json(), media_type="application/json")


async def _job(service: Service, template: Template, body: ChatBody) -> Job:
    most = body.max_completion_tokens or body.max_tokens or service.limits.max_tokens
    params = await service.params(body, FUNCTION, most, template.stops, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    text = await asyncio.to_thread(template.render, body.messages)
    tokens = await service.tokens(text, "messages", special=False)
    return Job(tokens, params)


class StreamWriter:
    """Pieces of a streamed answer."""

    def __init__(self, service: Service, template: Template, body: ChatBody, generation: Generation, heading: dict[str, Any]) -> None:
        self._service, self._template, self._body, self._generation = service, template, body, generation
        self._heading = heading
        self._begun: set[int] = set()
        """Answers of which a role was sent."""
        self._worded: set[int] = set()
        """Answers of which text was sent."""

    def write(self, event: Event) -> Iterator[ChatChunk]:
        """The piece of an event. A role comes before the first one."""
        if event.index not in self._begun:
            self._begun.add(event.index)
            yield self._piece(ChatChunkChoice(index=event.index, delta=Delta(role="assistant", content="")))
        text = event.text
        if self._template.strips and event.index not in self._worded:
            text = text.lstrip()
        if text:
            self._worded.add(event.index)
        logprobs = chat_logprobs(self._service.tokenizer, event.logprobs) if self._body.logprobs else None
        reason = finish_reason(event.finish_reason)
        yield self._piece(
            ChatChunkChoice(index=event.index, delta=Delta(content=text or None), logprobs=logprobs, finish_reason=reason)
        )  # fmt: skip

    def finish(self) -> Iterator[ChatChunk]:
        """Counts of tokens, if they are wanted."""
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield ChatChunk(**self._heading, usage=self._generation.usage())

    def _piece(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**self._heading, choices=[choice])
