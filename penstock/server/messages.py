"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from ..engine import Event
from ..engine.request import Completion
from .errors import Refused
from .generation import Generation, Job
from .limits import parsed
from .messages_protocol import (
    BlockDelta,
    BlockStart,
    BlockStop,
    CountBody,
    InputUsage,
    MessageAnswer,
    MessageDelta,
    MessagesBody,
    MessageStart,
    MessageStop,
    Ping,
    Reason,
    Stop,
    StreamEvent,
    TextBlock,
    TextDelta,
    TokenCount,
)  # fmt: skip
from .service import Service
from .streaming import EventStream, finished
from .templates import Template

FUNCTION = "messages"
PATH = "/v1/messages"
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""Anthropic's name of an error; other ones are ``invalid_request_error`` below status 500, and ``api_error``."""


async def messages(service: Service, request: Request) -> Response:
    """Answer a request."""
    body = await parsed(request, MessagesBody, FUNCTION, service.limits, service.workers)
    service.check_model(body.model)
    template = service.chat_template(FUNCTION)
    params = await service.params(body.chat(), FUNCTION, body.max_tokens, template.stops)
    generation = await service.start([Job(await _tokens(service, template, body), params)], FUNCTION)
    if body.stream:
        return MessageStream(generation, StreamWriter(template, body, generation), service.metrics, service.limits.seconds)
    with closing(generation):
        if not await finished(request, generation, service.metrics):
            return Response(status_code=499)
        (done,) = generation.requests[0].result.completions
        text = done.text.lstrip() if template.strips else done.text
        answer = _heading(body, generation)
        answer.content = [TextBlock(text=text)]
        stop = _stop(body, done)
        answer.stop_reason, answer.stop_sequence = stop.stop_reason, stop.stop_sequence
        return Response(answer.model_dump_json(), media_type="application/json")


async def count_tokens(service: Service, request: Request) -> Response:
    """Count the tokens of a prompt."""
    body = await parsed(request, CountBody, FUNCTION, service.limits, service.workers)
    service.check_model(body.model)
    tokens = await _tokens(service, service.chat_template(FUNCTION), body)
    return Response(TokenCount(input_tokens=len(tokens)).model_dump_json(), media_type="application/json")


async def _tokens(service: Service, template: Template, body: CountBody) -> list[int]:
    text = await service.workers.run(template.render, body.conversation())
    return await service.tokens(text, "messages", special=False)


def _heading(body: MessagesBody, generation: Generation) -> MessageAnswer:
    """An answer without content."""
    return MessageAnswer(id=f"msg_{secrets.token_hex(12)}", model=body.model, content=[], usage=_usage(generation))


def _usage(generation: Generation) -> InputUsage:
    usage = generation.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return InputUsage(
        input_tokens=usage.prompt_tokens - cached, cache_read_input_tokens=cached, output_tokens=usage.completion_tokens
    )  # fmt: skip


def _stop(body: MessagesBody, done: Completion) -> Stop:
    """Why a completion ended. Stop texts of the template end a turn."""
    found = done.stopped_by if isinstance(done.stopped_by, str) and done.stopped_by in body.stop_sequences else None
    reason: Reason = "stop_sequence" if found is not None else "max_tokens" if done.finish_reason == "length" else "end_turn"
    return Stop(stop_reason=reason, stop_sequence=found)


class StreamWriter:
    """Events of a streamed answer."""

    def __init__(self, template: Template, body: MessagesBody, generation: Generation) -> None:
        self._template, self._body, self._generation = template, body, generation
        self._begun = self._worded = False

    def write(self, event: Event) -> Iterator[StreamEvent]:
        """What an event of the engine adds. The begin of the message comes before the first one."""
        if not self._begun:
            self._begun = True
            yield MessageStart(message=_heading(self._body, self._generation))
            yield BlockStart()
            yield Ping()
        text = event.text if self._worded or not self._template.strips else event.text.lstrip()
        if text:
            self._worded = True
            yield BlockDelta(delta=TextDelta(text=text))

    def finish(self) -> Iterator[StreamEvent]:
        """The end of the message."""
        (done,) = self._generation.requests[0].result.completions
        yield BlockStop()
        yield MessageDelta(delta=_stop(self._body, done), usage=_usage(self._generation))
        yield MessageStop()


class MessageStream(EventStream):
    """Anthropic's form of a stream: events with names."""

    end = b""

    def encoded(self, piece: BaseModel) -> bytes:
        """One event."""
        assert isinstance(piece, StreamEvent)
        return b"event: " + piece.type.encode() + b"\n" + super().encoded(piece)

    def failed(self, error: Refused) -> bytes:
        """The event of an error."""
        return b"event: error\ndata: " + bytes(error_response(error).body) + b"\n\n"


def error_response(error: Refused) -> JSONResponse:
    """Anthropic's error object."""
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return JSONResponse({"type": "error", "error": {"type": kind, "message": error.message}}, error.status, error.headers)
