"""Tools in requests and answers: functions that a model may call."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ..errors import shortened
from .bodies import UNREAD, Body, Text, one_of

FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]
"""As Anthropic's. OpenAI's have at most 64 characters."""


class Function(Body):
    """A function that a model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments."""
    strict: bool = False

    @property
    def schema_(self) -> dict[str, Any]:
        """The schema of the arguments, which are an object. A function without one takes none."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}

    @property
    def shown(self) -> dict[str, Any]:
        """What the model sees."""
        return self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)


class Tool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: Text


class NamedTool(Body):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | NamedTool,
    one_of("'auto', 'none', 'required' or {'type': 'function', 'function': {'name': NAME}}"),
]


class CalledFunction(Body):
    """A function and its arguments, as the model wrote them."""

    name: Text
    arguments: str
    parsed_arguments: Annotated[Any, UNREAD] = None
    """OpenAI's client adds it to calls that it parsed. It is not read."""

    @property
    def value(self) -> Any:
        """The arguments as an object; those that are none as text."""
        try:
            found = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments
        return found if isinstance(found, dict) else self.arguments


class ToolCall(Body):
    """A call of an earlier answer."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Calls that a client joined from a stream have it. It is not read."""


class FunctionAnswer(BaseModel):
    """A function and its arguments, or pieces of them."""

    name: str | None = Field(default=None, exclude_if=lambda value: value is None)
    arguments: str


class CallAnswer(BaseModel):
    """A call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionAnswer


class CallDelta(BaseModel):
    """A piece of a call. The first one has its ID and the name."""

    index: int
    id: str | None = Field(default=None, exclude_if=lambda value: value is None)
    type: Literal["function"] | None = Field(default=None, exclude_if=lambda value: value is None)
    function: FunctionAnswer


def call_id(prefix: str = "call") -> str:
    """A new ID of a call."""
    return f"{prefix}_{secrets.token_hex(12)}"


def check_tools(functions: Sequence[Function], choice: str | NamedTool) -> None:
    """Raise ValueError for names that several functions have, or a choice that is none of them."""
    names = [one.name for one in functions]
    twice = [name for at, name in enumerate(names) if name in names[:at]]
    if twice:
        raise ValueError(f"the names of tools must differ, got {twice[0]!r} twice")
    if not names and choice not in ("auto", "none"):
        raise ValueError("tool_choice must be 'auto' or 'none' without tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ValueError(f"tool_choice must name one of the tools, got {shortened(choice.function.name)}")
    for one in functions:
        kind = (one.parameters or {}).get("type", "object")
        if kind != "object":
            raise ValueError(f"the parameters of a tool must have the type 'object', got {shortened(kind)} for {one.name!r}")
