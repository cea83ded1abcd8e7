"""From messages and tools to a prompt, what may follow it, and what the answer's text consists of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..engine.request import Constraint
from .answers import AnswerForm
from .call_grammars import call_grammar, styled
from .errors import Refused
from .grammars import wanted_schema
from .protocol import Message, ResponseFormat
from .service import Service
from .templates import Template
from .tools import Function, NamedTool


@dataclass(frozen=True)
class Conversation:
    """What a client says and offers."""

    messages: Sequence[Message]
    functions: Sequence[Function] = ()
    choice: str | NamedTool = "auto"
    parallel: bool = True
    response_format: ResponseFormat | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the template."""

    @property
    def offered(self) -> Sequence[Function]:
        """Functions that the model sees: none if it may call none."""
        return () if self.choice == "none" else self.functions


@dataclass(frozen=True)
class Prepared:
    """What the engine needs of a conversation."""

    prompt: str
    form: AnswerForm
    constraint: Callable[[], Constraint] | None
    stops: tuple[str, ...]


async def prepare(
    service: Service, template: Template, talk: Conversation, function: str, render: Callable[[], str] | None = None
) -> Prepared:  # fmt: skip
    """Render a conversation, by ``render`` if given. Raises Refused or InvalidArgument."""
    _check(service, template, talk, function)
    prompt = await asyncio.to_thread(render or partial(template.render, talk.messages, talk.offered, talk.variables))
    form, stops = answer_form(template, talk, prompt), template.stops
    if form.calls is not None and form.calls.end and not talk.parallel:
        stops = (*stops, form.calls.end)
    constraint = await asyncio.to_thread(_constraint, service, talk, form, function)
    return Prepared(prompt, form, constraint, stops)


def answer_form(template: Template, talk: Conversation, prompt: str) -> AnswerForm:
    """What an answer to a prompt consists of."""
    reasoning = template.reasoning
    names = {talk.choice.function.name} if isinstance(talk.choice, NamedTool) else {one.name for one in talk.offered}
    return AnswerForm(
        template.strips, reasoning, reasoning is not None and reasoning.begun(prompt), template.calls if names else None,
        frozenset(names), talk.parallel,
    )  # fmt: skip


def _check(service: Service, template: Template, talk: Conversation, function: str) -> None:
    if not talk.offered:
        return
    shown = sum(len(json.dumps(one.shown)) for one in talk.functions)
    service.check(function, "the bytes of the tools", service.limits.tool_bytes, shown, "tools")
    if template.calls is None:
        rule = "absent, because this server does not know how the model writes calls"
        message = f"{function}: tools must be {rule}, got {len(talk.functions)}. Serve with --tool-parser."
        raise Refused(400, message, param="tools")
    if not template.calls.begin and talk.choice == "auto" and wanted_schema(talk.response_format) is not None:
        rule = "a JSON answer cannot be told from a call of this model: response_format must be absent beside tools"
        message = f"{function}: {rule}, got both. Set tool_choice to 'required' or 'none'."
        raise Refused(400, message, param="response_format")


def _constraint(service: Service, talk: Conversation, form: AnswerForm, function: str) -> Callable[[], Constraint] | None:
    """What the answer must follow: calls if they are required, a format, or calls of strict functions. None: nothing."""
    schema = wanted_schema(talk.response_format)
    if schema is not None:
        service.check(function, "the bytes of the schema", service.limits.schema_bytes, len(json.dumps(schema)), "response_format")
        plain = service.grammars.compile(schema, function)
        if form.calls is None and form.reasoning is None:
            return plain
    required = talk.choice == "required" or isinstance(talk.choice, NamedTool)
    allowed = [(at, one) for at, one in enumerate(talk.functions) if one.name in form.names]
    if not required and schema is None and not any(one.strict for _, one in allowed):
        return None
    for at, one in allowed:
        service.grammars.compile(styled(one.schema_), function, f"tools.{at}.function.parameters")
    several = talk.parallel and service.grammars.ends
    source = call_grammar(form, [one for _, one in allowed], required=required, several=several, schema=schema)
    return service.grammars.compile_lark(source, function, "tools" if allowed else "response_format")
