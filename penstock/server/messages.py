"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from ..engine import Event
from .answers import AnswerForm, AnswerReader
from .conversation import Conversation, Names, prepare, rendered
from .errors import Refused
from .generation import Generation, Job
from .limits import parsed
from .messages_output import (
    BlockWriter,
    InputUsage,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    Reason,
    Stop,
)  # fmt: skip
from .messages_protocol import CountBody, MessagesBody, TokenCount
from .service import Service
from .streaming import EventStream, NamedEvent
from .templates import Template
from .thinking import thinking_variables, within_budget

FUNCTION = "messages"
PATH = "/v1/messages"
NAMES = Names("tools.{}.input_schema", "output_config.format", "'any'")
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""Anthropic's name of an error; other ones are ``invalid_request_error`` below status 500, and ``api_error``."""


async def messages(service: Service, request: Request) -> Response:
    """Answer a request."""
    body = await parsed(request, MessagesBody, FUNCTION, service.limits, service.processes)
    service.check_model(body.model)
    job, form = await _job(service, service.chat_template(FUNCTION), body)
    generation = await service.start([job], FUNCTION)
    writer = StreamWriter(body, form, generation)
    if body.stream:
        return MessageStream(generation, writer, service.metrics, service.limits.seconds)
    with closing(generation):
        await generation.finish()
        answer = await service.workers.run(writer.whole)
        return Response(answer.model_dump_json(), media_type="application/json")


async def count_tokens(service: Service, request: Request) -> Response:
    """Count the tokens of a prompt."""
    body = await parsed(request, CountBody, FUNCTION, service.limits, service.processes)
    service.check_model(body.model)
    template = service.chat_template(FUNCTION)
    text = await rendered(service, _conversation(template, body), FUNCTION)
    tokens = await service.tokens(text, "messages", special=False)
    return Response(TokenCount(input_tokens=len(tokens)).model_dump_json(), media_type="application/json")


async def _job(service: Service, template: Template, body: MessagesBody) -> tuple[Job, AnswerForm]:
    ready = await prepare(service, template, _conversation(template, body), FUNCTION)
    constraint, budget = ready.constraint, None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None:
        constraint = within_budget(service.tokenizer, service.engine.vocab_size, ready.form, budget, constraint)
    params = await service.params(body.sampling, FUNCTION, body.max_tokens, ready.stops, constraint=constraint, prelude=ready.prelude)
    return Job(await service.tokens(ready.prompt, "messages", special=False), params), ready.form


def _conversation(template: Template, body: CountBody) -> Conversation:
    variables = {} if body.thinking is None else thinking_variables(template, body.thinking.type, FUNCTION)
    return Conversation(
        body.conversation, body.functions, body.tool_choice.chat, not body.tool_choice.disable_parallel_tool_use, body.response_format,
        variables, names=NAMES,
    )  # fmt: skip


class StreamWriter:
    """Events of a streamed answer, and the whole one."""

    def __init__(self, body: MessagesBody, form: AnswerForm, generation: Generation) -> None:
        self._body, self._generation = body, generation
        self._reader, self._output = AnswerReader(form), BlockWriter()
        self._begun = False

    def write(self, event: Event) -> Iterator[NamedEvent]:
        """What an event of the engine adds. The begin of the message comes before the first one."""
        if not self._begun:
            self._begun = True
            yield MessageStart(message=self._answer())
            yield Ping()
        for piece in self._reader.push(event.text):
            yield from self._output.write(piece)

    def finish(self) -> Iterator[NamedEvent]:
        """The end of the message."""
        for piece in self._reader.finish():
            yield from self._output.write(piece)
        yield from self._output.finish()
        yield MessageDelta(delta=self._stop(), usage=self._usage())
        yield MessageStop()

    def whole(self) -> MessageAnswer:
        """The whole answer."""
        for _ in self.write(Event(0, text=self._generation.requests[0].result.text)):
            pass
        for _ in self.finish():
            pass
        return self._answer().model_copy(update={"content": self._output.blocks, **dict(self._stop())})

    def _answer(self) -> MessageAnswer:
        """An answer without content."""
        return MessageAnswer(id=f"msg_{secrets.token_hex(12)}", model=self._body.model, content=[], usage=self._usage())

    def _usage(self) -> InputUsage:
        usage = self._generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return InputUsage(
            input_tokens=usage.prompt_tokens - cached, cache_read_input_tokens=cached, output_tokens=usage.completion_tokens
        )  # fmt: skip

    def _stop(self) -> Stop:
        """Why the completion ended. Stop texts of the template end a turn, or what calls tools."""
        (done,) = self._generation.requests[0].result.completions
        if isinstance(done.stopped_by, str) and done.stopped_by in self._body.stop_sequences:
            return Stop(stop_reason="stop_sequence", stop_sequence=done.stopped_by)
        ended: Reason = "tool_use" if self._output.called and not self._reader.cut else "end_turn"
        return Stop(stop_reason="max_tokens" if done.finish_reason == "length" else ended, stop_sequence=None)


class MessageStream(EventStream):
    """Anthropic's form of a stream: events with names."""

    end = b""

    def failed(self, error: Refused) -> bytes:
        """The event of an error."""
        return b"event: error\ndata: " + bytes(error_response(error).body) + b"\n\n"


def error_response(error: Refused) -> JSONResponse:
    """Anthropic's error object."""
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return JSONResponse({"type": "error", "error": {"type": kind, "message": error.message}}, error.status, error.headers)
