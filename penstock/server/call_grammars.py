"""Grammars of answers that call functions, in llguidance's form of Lark's syntax."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .answers import AnswerForm
from .families import CallForm
from .grammars import OPTIONS
from .tools import Function

ANY = r"/(.|\n)*/"
STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""White space of arguments, as Python's json and templates write it. A schema may have another ``x-guidance``."""


def call_grammar(
    form: AnswerForm, functions: Sequence[Function], *, required: bool, several: bool, schema: dict[str, Any] | None = None
) -> str:
    r"""The grammar of answers of a form.

    required : bool
        The answer calls a function. Otherwise it may also be text...
    schema : dict, optional
        ...or JSON of this schema.
    several : bool
        It may have several calls.

    >>> from penstock.server.families import CALLS
    >>> form = AnswerForm(calls=CALLS["llama"])
    >>> print(call_grammar(form, [Function(name="f")], required=True, several=True))  # doctest: +ELLIPSIS
    start: call
    call: call_0
    call_0: "{\"name\": \"f\", \"parameters\": " json_0 "}"
    json_0: %json {"x-guidance": {...}, "type": "object", "properties": {}, "additionalProperties": false}
    """
    lines: list[str] = []
    thought = _thought(form, lines)
    if form.calls is None or not functions:
        assert schema is not None
        return "\n".join([f"start: {thought}answer", f"answer: %json {json.dumps({'x-guidance': OPTIONS, **schema})}", *lines])
    calls = 'call ("\\n" call)*' if several and form.calls.begin else "call"
    if required:
        lines.insert(0, f"start: {thought}{calls}")
    elif schema is not None:
        lines[:0] = [f"start: {thought}answer | {thought}{calls}", f"answer: %json {json.dumps({'x-guidance': OPTIONS, **schema})}"]
    elif form.calls.begin:
        lines[:0] = [f"start: {thought}call{'*' if several else '?'} text", f"text: {ANY}"]
        lines.append(f"begin[lazy]: {ANY} {_quoted(form.calls.begin)}")
    else:
        lines[:0] = [f"start: {thought}call | {thought}text", r"text: /([^{](.|\n)*)?/"]
    lines.append(f"call: {' | '.join(f'call_{at}' for at in range(len(functions)))}")
    free = bool(form.calls.begin) and not required and schema is None
    for at, function in enumerate(functions):
        lines += [f"call_{at}: {_call(form.calls, function, at, free)}", f"json_{at}: %json {json.dumps(styled(function.schema_))}"]
    return "\n".join(lines)


def styled(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with the white space of arguments."""
    return {"x-guidance": STYLE, **schema}


def _thought(form: AnswerForm, lines: list[str]) -> str:
    """The rule for reasoning before an answer. Adds what it consists of to ``lines``."""
    if form.reasoning is None:
        return ""
    begin = "" if form.thinking else f"{_quoted(form.reasoning.begin.removeprefix(form.opened))} "
    lines += [r"thought: thinking / ?\n{0,2}/", "thinking[lazy]: THINKING", f"THINKING: {begin}{ANY} {_quoted(form.reasoning.end)}"]
    return "thought " if form.thinking or form.opened else "thought? "


def _call(form: CallForm, function: Function, at: int, free: bool) -> str:
    head = f'{{"name": {json.dumps(function.name)}, "{form.arguments}": '
    if form.begin:
        before, after = ("begin " if free else ""), ("" if free else form.begin)
        return f"{before}{_quoted(after + chr(10) + head)} json_{at} {_quoted('}' + chr(10) + form.end)}"
    return f"{_quoted(head)} json_{at} {_quoted('}')}"


def _quoted(text: str) -> str:
    return json.dumps(text)
