"""From messages and tools to a prompt, what may follow it, and what the answer's text consists of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..engine.parameters import Constraint, Prelude
from .answers import AnswerForm
from .call_grammars import call_grammar, styled
from .continuation import NotContinuable, continuation, without_overlap
from .errors import Refused
from .grammars import wanted_schema
from .one_call import with_one_call
from .protocol import Message, ResponseFormat
from .service import Service
from .templates import Template
from .texts import Texts
from .thinking import Thought
from .tools import Function, NamedTool


@dataclass(frozen=True)
class Names:
    """What an API calls the fields that errors are about."""

    schema: str = "tools.{}.function.parameters"
    format: str = "response_format"
    required: str = "'required'"


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
    before: str | None = None
    """The text of the state that the messages continue."""
    names: Names = Names()

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

    @property
    def prelude(self) -> Callable[[], Prelude] | None:
        """What finds the part of an answer in which the client's stop texts do not count."""
        return None if self.form.reasoning is None else partial(Thought, self.form)


Render = Callable[[Texts], str]
"""Writes the prompt of a conversation. It must be a function of a module, perhaps with arguments."""


async def prepare(
    service: Service, template: Template, talk: Conversation, function: str, render: Render | None = None
) -> Prepared:  # fmt: skip
    """Render a conversation, by ``render`` if given. Raises Refused or InvalidArgument."""
    prompt = await rendered(service, talk, function, render)
    form, constraint = answer_form(template, talk, prompt), None
    if _constrained(talk, form):
        constraint = await service.compiled(function, _constraint, service, talk, form, function)
    if form.calls is not None and not talk.parallel:
        constraint = with_one_call(service.tokenizer, service.engine.vocab_size, form, constraint)
    return Prepared(prompt, form, constraint, template.stops)


async def rendered(service: Service, talk: Conversation, function: str, render: Render | None = None) -> str:
    """The prompt alone. Raises Refused or InvalidArgument."""
    return await service.work(_rendered, service.texts, talk, function, service.limits.tool_bytes, render or partial(_prompt, talk=talk))


def _rendered(texts: Texts, talk: Conversation, function: str, tool_bytes: int, render: Render) -> str:
    _check(texts.template, talk, function, tool_bytes)
    return render(texts)


def _prompt(texts: Texts, talk: Conversation) -> str:
    assert texts.template is not None
    render = partial(texts.template.render, functions=talk.offered, variables=talk.variables)
    if talk.before is None:
        return render(talk.messages)
    try:
        return without_overlap(continuation(render, talk.messages), talk.before)
    except NotContinuable as error:
        rule = f"such that the chat template writes all of them after an earlier answer, got others: it {error}"
        remedy = "Send the whole conversation without state."
        raise Refused(400, f"chat: messages must be {rule}. {remedy}", param="messages") from None


def answer_form(template: Template, talk: Conversation, prompt: str) -> AnswerForm:
    """What an answer to a prompt consists of."""
    reasoning = template.reasoning
    names = {talk.choice.function.name} if isinstance(talk.choice, NamedTool) else {one.name for one in talk.offered}
    return AnswerForm(
        template.strips, reasoning, reasoning is not None and reasoning.begun(prompt), template.calls if names else None,
        frozenset(names), talk.parallel, "" if reasoning is None else reasoning.opened(prompt),
    )  # fmt: skip


def _check(template: Template | None, talk: Conversation, function: str, tool_bytes: int) -> None:
    if not talk.offered:
        return
    assert template is not None
    shown = sum(len(json.dumps(one.shown)) for one in talk.functions)
    if shown > tool_bytes:
        raise Refused(400, f"{function}: the bytes of the tools must be at most {tool_bytes}, got {shown}.", param="tools")
    if template.calls is None:
        rule = "absent, because this server does not know how the model writes calls"
        message = f"{function}: tools must be {rule}, got {len(talk.functions)}. Serve with --tool-parser."
        raise Refused(400, message, param="tools")
    if not template.calls.begin and talk.choice == "auto" and wanted_schema(talk.response_format) is not None:
        rule = f"a JSON answer cannot be told from a call of this model: {talk.names.format} must be absent beside tools"
        message = f"{function}: {rule}, got both. Set tool_choice to {talk.names.required} or 'none'."
        raise Refused(400, message, param=talk.names.format)


def _required(talk: Conversation) -> bool:
    return talk.choice == "required" or isinstance(talk.choice, NamedTool)


def _constrained(talk: Conversation, form: AnswerForm) -> bool:
    """Whether the answer must follow something: calls if they are required, a format, or calls of strict functions."""
    strict = any(one.strict for one in talk.functions if one.name in form.names)
    return _required(talk) or strict or wanted_schema(talk.response_format) is not None


def _constraint(service: Service, talk: Conversation, form: AnswerForm, function: str) -> Callable[[], Constraint]:
    """What the answer must follow."""
    schema = wanted_schema(talk.response_format)
    if schema is not None:
        plain = service.grammars.compile(schema, function, talk.names.format)
        if form.calls is None and form.reasoning is None:
            return plain
    required, allowed = _required(talk), [(at, one) for at, one in enumerate(talk.functions) if one.name in form.names]
    for at, one in allowed:
        service.grammars.compile(styled(one.schema_), function, talk.names.schema.format(at))
    several = talk.parallel and service.grammars.ends
    source = call_grammar(form, [one for _, one in allowed], required=required, several=several, schema=schema)
    return service.grammars.compile_lark(source, function, "tools" if allowed else talk.names.format)
