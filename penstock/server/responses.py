"""``/v1/responses``: conversations whose turns continue from kept states.

A response is a state (``states.py``): its file has the answer, the input and what the next turn has to know as notes. The next turn
computes its own tokens only.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from ..engine import Event, SequenceState
from ..models.tokenizers import ends_of, text_after
from .answers import AnswerForm, AnswerReader
from .continuation import NotContinuable, continuation
from .conversation import Conversation, Names, prepare
from .errors import Refused
from .generation import Generation, Job
from .limits import parsed
from .protocol import Message, SamplingBody
from .responses_output import OutputWriter
from .responses_protocol import Incomplete, InputDetails, Item, Link, ResponseAnswer, ResponseBody, ResponseUsage, StreamEvent, to_messages
from .saving import without_end
from .service import Service
from .states import new_name
from .streaming import EventStream, encoded
from .templates import Template
from .texts import Texts

FUNCTION = "responses"
NAMES = Names("tools.{}.parameters", "text.format")
ID = re.compile(r"resp_([0-9]{1,15})_([0-9a-f]{32})", re.ASCII)


@dataclass(frozen=True)
class Turn:
    """One request on its way."""

    body: ResponseBody
    template: Template
    answer: ResponseAnswer
    """As it is before the model begins."""
    form: AnswerForm
    state: SequenceState | None
    """What it continues from."""
    shown: list[dict[str, Any]]
    """The tools that the model has seen."""


async def responses(service: Service, request: Request) -> Response:
    """Answer a request."""
    body = await parsed(request, ResponseBody, FUNCTION, service.limits, service.processes)
    service.check_model(body.model)
    turn, job = await _begin(service, service.chat_template(FUNCTION), body)
    generation = await service.start([job], FUNCTION)
    if body.stream:
        return ResponseStream(generation, StreamWriter(service, turn, generation), service)
    with closing(generation):
        await generation.finish()
        writer = StreamWriter(service, turn, generation)
        answer = await service.workers.run(writer.whole)
        return Response(answer.model_dump_json(), media_type="application/json")


async def _begin(service: Service, template: Template, body: ResponseBody) -> tuple[Turn, Job]:
    """What a request asks for, and its prompt: the tokens after the state of the previous response, if there is one."""
    items, state, link, render = body.input, None, None, None
    if body.store or body.previous_response_id is not None:
        await service.workers.run(service.engine.model_hash)  # the first time takes seconds
    if body.previous_response_id is not None:
        link, state = await service.workers.run(_previous, service, body.previous_response_id)
        _check_link(body, link)
    messages = _messages(items, {} if link is None else link.names)
    if link is None and body.instructions is not None:
        messages = [Message(role="system", content=body.instructions), *messages]
    form = None if body.text.format is None else body.text.format.chat
    talk = Conversation(messages, body.tools, body.choice, body.parallel_tool_calls, form, names=NAMES)
    if link is not None:
        render = partial(_after, messages=messages, talk=talk, link=link)
    ready = await prepare(service, template, talk, FUNCTION, render)
    names = {"model", "temperature", "top_p", "cache_salt", "priority"}
    sampling = SamplingBody.model_validate(body.model_dump(include=names, exclude_unset=True))
    params = await service.params(
        sampling, FUNCTION, body.max_output_tokens or service.limits.max_tokens, ready.stops, constraint=ready.constraint,
        keep_state=body.store,
    )  # fmt: skip
    tokens = await service.tokens(ready.prompt, "input", special=False, state=state)
    known = len(tokens) + (0 if state is None else len(state.tokens))
    job = Job(tokens, service.fitting(params, known, body.max_output_tokens), state=state)
    shown = [one.shown for one in talk.offered] if link is None else link.shown
    return Turn(body, template, _answer(service, body), ready.form, state, shown), job


def _after(texts: Texts, messages: list[Message], talk: Conversation, link: Link) -> str:
    """The text after a state: what the state already has of it is left out."""
    assert texts.template is not None
    try:
        return continuation(partial(texts.template.render, functions=talk.offered), messages).removeprefix(link.tail)
    except NotContinuable as error:
        rule = f"absent, because the model's chat template {error}"
        message = f"{FUNCTION}: previous_response_id must be {rule}, got one. Send all of the input."
        raise Refused(400, message, param="previous_response_id", code="template_not_continuable") from None


def _messages(items: list[Item], names: dict[str, str]) -> list[Message]:
    """Messages of the input. Raises Refused for a result without a call."""
    names = {**names, **{item.call_id: item.name for item in items if item.type == "function_call" and item.call_id and item.name}}
    found = []
    for one in to_messages(items):
        if one.tool_call_id is not None:
            if one.tool_call_id not in names:
                message = f"{FUNCTION}: call_id must be of a call in the input or the previous response, got {one.tool_call_id[:60]!r}."
                raise Refused(400, message, param="input")
            one = one.model_copy(update={"name": names[one.tool_call_id]})
        found.append(one)
    return found


def _previous(service: Service, name: str) -> tuple[Link, SequenceState]:
    try:
        link = Link.model_validate_json(_notes(service, name)["link"])
        return link, service.states.get(_state_name(name))
    except Refused as error:
        if error.status != 404:
            raise
    except (KeyError, ValidationError):
        pass
    message = f"{FUNCTION}: previous_response_id must be of a response that the server keeps, got {name[:80]!r}."
    raise Refused(404, message, param="previous_response_id", code="previous_response_not_found")


def _check_link(body: ResponseBody, link: Link) -> None:
    """Raise Refused for instructions or tools that are not those in the state."""
    remedy = "A state has them: give them again, or send all of the input without previous_response_id."
    if body.instructions != link.instructions:
        message = f"{FUNCTION}: instructions must be those of the previous response, got others or none. {remedy}"
        raise Refused(400, message, param="instructions", code="instructions_changed")
    if [one.shown for one in body.tools] != link.shown and (link.shown or body.choice != "none"):
        got = "others or none" if link.shown else "some that its state does not have"
        message = f"{FUNCTION}: tools must be those of the previous response, got {got}. {remedy}"
        raise Refused(400, message, param="tools", code="tools_changed")


def _answer(service: Service, body: ResponseBody) -> ResponseAnswer:
    _, created, digits = new_name().split("-")
    form = {"type": "text"} if body.text.format is None else body.text.format.model_dump(by_alias=True, exclude_none=True)
    answer = ResponseAnswer(
        id=f"resp_{created}_{digits}", created_at=int(created), instructions=body.instructions, max_output_tokens=body.max_output_tokens,
        metadata=body.metadata, model=body.model, parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id, store=body.store, temperature=body.temperature, text={"format": form},
        tool_choice=body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
        tools=[{"parameters": None, **one.model_dump(exclude_none=True)} for one in body.tools], top_p=body.top_p,
    )  # fmt: skip
    try:
        answer.model_dump_json()
    except PydanticSerializationError:  # JSON can have them, and UTF-8 cannot
        message = f"{FUNCTION}: metadata, instructions and tools must be free of lone surrogates, got one."
        raise Refused(400, message, param="metadata") from None
    return answer


class StreamWriter:
    """Events of a streamed response, and the whole one."""

    def __init__(self, service: Service, turn: Turn, generation: Generation) -> None:
        self._service, self._turn, self._generation = service, turn, generation
        self._reader, self._output = AnswerReader(turn.form), OutputWriter()

    def begin(self) -> Iterator[StreamEvent]:
        """Events before the first token."""
        yield self._output.event("created", response=self._turn.answer)
        yield self._output.event("in_progress", response=self._turn.answer)

    def write(self, event: Event) -> Iterator[StreamEvent]:
        """Events of the engine's event."""
        for piece in self._reader.push(event.text):
            yield from self._output.write(piece)

    def finish(self) -> Iterator[StreamEvent]:
        """Events of the end. Keeps the response."""
        done = self._generation.requests[0].result.completions[0]
        status: Any = "incomplete" if done.finish_reason == "length" else "completed"
        for piece in self._reader.finish():
            yield from self._output.write(piece)
        yield from self._output.finish(status, self._reader.cut)
        answer = self._turn.answer.model_copy(
            update={
                "status": status, "output": self._output.items, "usage": self._usage(),
                "incomplete_details": Incomplete() if status == "incomplete" else None,
            }
        )  # fmt: skip
        if done.state is not None:
            self._keep(answer, done.state, done.text)
        yield self._output.event(status, response=answer)

    def whole(self) -> ResponseAnswer:
        """The whole response. Keeps it."""
        for _ in self.write(Event(0, text=self._generation.requests[0].result.text)):
            pass
        *_, last = self.finish()
        answer: ResponseAnswer = (last.model_extra or {})["response"]
        return answer

    def failed(self, error: Refused) -> StreamEvent:
        """The event of an error."""
        told = {"code": error.code or "server_error", "message": error.message}
        answer = self._turn.answer.model_copy(update={"status": "failed", "error": told, "output": self._output.items})
        return self._output.event("failed", response=answer)

    def _usage(self) -> ResponseUsage:
        request, state = self._generation.requests[0], self._turn.state
        known = request.result.cached_tokens if state is None else state.aligned
        prompt, completion = len(request.prompt), len(request.result.tokens)
        details = InputDetails(cached_tokens=known)
        return ResponseUsage(
            input_tokens=prompt, input_tokens_details=details, output_tokens=completion, total_tokens=prompt + completion
        )  # fmt: skip

    def _keep(self, answer: ResponseAnswer, state: SequenceState, text: str) -> None:
        kept, tail, stops = without_end(state, ends_of(self._service.tokenizer)), "", self._turn.template.stops
        if kept is state and stops:  # else the template writes what ends a message
            request = self._generation.requests[0]
            rest = text_after(self._service.tokenizer, request.result.tokens, request.prompt)[len(text) :]
            tail = rest if rest.startswith(stops) else ""
        body = self._turn.body
        calls = [one.model_extra or {} for one in answer.output if one.type == "function_call"]
        link = Link(
            instructions=body.instructions, shown=self._turn.shown, tail=tail,
            names={call["call_id"]: call["name"] for call in calls},
        )  # fmt: skip
        given = json.dumps([one.model_dump(exclude_none=True, exclude_defaults=False) for one in body.input])
        notes = {"response": answer.model_dump_json(), "input": given, "link": link.model_dump_json()}
        self._service.states.add_named(_state_name(answer.id), kept, notes)


class ResponseStream(EventStream):
    """A streamed response."""

    end = b""

    def __init__(self, generation: Generation, writer: StreamWriter, service: Service) -> None:
        super().__init__(generation, writer, service.metrics, service.limits.seconds)
        self._events = writer

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield b"".join(map(encoded, self._events.begin()))
        async for piece in super()._pieces():
            yield piece

    def failed(self, error: Refused) -> bytes:
        """The event of an error."""
        return encoded(self._events.failed(error))


# what was kept


def _state_name(name: str) -> str:
    found = ID.fullmatch(name)
    if found is None:
        raise _absent(name)
    return f"state-{found[1]}-{found[2]}"


def _notes(service: Service, name: str) -> dict[str, str]:
    try:
        found = service.states.notes(_state_name(name))
    except Refused as error:
        raise _absent(name) if error.status == 404 else error from None
    if "response" not in found:
        raise _absent(name)
    return found


def kept_response(service: Service, name: str) -> ResponseAnswer:
    """A response that was kept. Raises Refused."""
    try:
        return ResponseAnswer.model_validate_json(_notes(service, name)["response"])
    except ValidationError:  # a client may send a file of a state with any notes
        raise _absent(name) from None


def input_items(service: Service, name: str) -> dict[str, Any]:
    """The items of its own input: earlier ones are those of the previous responses. Raises Refused."""
    try:
        found = json.loads(_notes(service, name)["input"])
    except (KeyError, ValueError, RecursionError):
        raise _absent(name) from None
    items = [_shown(item, f"in_{place}") for place, item in enumerate(found)]
    return {"object": "list", "data": items, "first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}


def _shown(item: dict[str, Any], name: str) -> dict[str, Any]:
    content = item.get("content")
    if isinstance(content, str) and item.get("type") == "message":
        item["content"] = [{"type": "output_text" if item.get("role") == "assistant" else "input_text", "text": content}]
    return {"id": name, "status": "completed", **item}


def remove_response(service: Service, name: str) -> dict[str, Any]:
    """Drop a response and its state. Raises Refused."""
    _notes(service, name)
    service.states.remove(_state_name(name))
    return {"id": name, "object": "response", "deleted": True}


def _absent(name: str) -> Refused:
    return Refused(
        404,
        f"{FUNCTION}: the response must be one that the server keeps, got {name[:80]!r}.",
        param="response_id",
        code="response_not_found",
    )
