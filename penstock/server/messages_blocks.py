"""Blocks of the contents in Anthropic's requests, and the messages of a chat that they make."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from .bodies import Body, Text, one_of, tagged
from .protocol import Message, TextPart
from .tools import CalledFunction, ToolCall
from .unused import Nothing, Settings

ERROR = "Error: "
"""Before the text of a result that is an error: templates have no other place for it."""


class TextBlock(Body):
    """A text. Nothing reads ``cache_control``: the engine caches prefixes by itself."""

    type: Literal["text"]
    text: str
    cache_control: Settings | None = None
    citations: Nothing = Field([])


TextContent = Annotated[str | Annotated[list[TextBlock], Field(fail_fast=True)], one_of("a text or a list of blocks of type text")]


NoToolset = Annotated[None, one_of("absent", "All tools are the client's.")]


class DirectCaller(Body):
    """The model called the tool itself, not code that ran on a server."""

    type: Literal["direct"]


class ToolUse(Body):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Annotated[dict[str, Any], AfterValidator(json.dumps)]
    """As JSON."""
    cache_control: Settings | None = None
    caller: DirectCaller | None = None
    toolset_name: NoToolset = None

    @property
    def call(self) -> ToolCall:
        """The same in a chat."""
        return ToolCall(id=self.id, function=CalledFunction(name=self.name, arguments=str(self.input)))


class ToolResult(Body):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextContent = ""
    is_error: bool = False
    cache_control: Settings | None = None
    toolset_name: NoToolset = None

    @property
    def message(self) -> Message:
        """The same in a chat."""
        begin = _parts(ERROR) if self.is_error else []
        return Message(role="tool", tool_call_id=self.tool_use_id, content=[*begin, *_parts(self.content)])


class ThinkingBlock(Body):
    """Reasoning of an earlier answer. Nothing reads its signature: the model may be shown any reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


Block = Annotated[
    Annotated[TextBlock | ToolUse | ToolResult | ThinkingBlock, Field(discriminator="type")],
    tagged("a block of type text, tool_use, tool_result or thinking", "This server reads texts only, and nothing encrypted."),
]


def _blocks(content: Any) -> Any:
    """A text is a block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Content = Annotated[Annotated[list[Block], Field(fail_fast=True)], tagged("a text or a list of blocks"), BeforeValidator(_blocks)]
Role = Literal["user", "assistant", "system"]
ROLES: dict[str, str] = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user"}
"""Of the messages that may have a block."""


class Turn(Body):
    """A message."""

    role: Role
    content: Content

    @model_validator(mode="after")
    def check_blocks(self) -> Turn:
        """Blocks that belong to a role."""
        for one in self.content:
            role = ROLES.get(one.type, self.role)
            if role != self.role:
                raise ValueError(f"a block of type {one.type} must be in a message of the {role}, got one of the {self.role}")
        return self


def to_messages(system: str | Sequence[TextBlock] | None, turns: Sequence[Turn]) -> list[Message]:
    """Messages of a chat, that of the system first. Neighbours of one role are one message. Raises ValueError for text before a result."""
    joined: list[tuple[Role, list[Any]]] = []
    for one in turns:
        if joined and joined[-1][0] == one.role:
            joined[-1][1].extend(one.content)
        else:
            joined.append((one.role, list(one.content)))
    found = [] if system is None else [Message(role="system", content=_parts(system))]
    if system is not None and joined and joined[0][0] == "system":
        found = [Message(role="system", content=[*_parts(system), *_parts(joined.pop(0)[1])])]
    for role, blocks in joined:
        if role == "assistant":
            found.append(_answer(blocks))
        elif role == "user":
            found.extend(_user(blocks))
        else:
            found.append(Message(role=role, content=_parts(blocks)))
    return found


def _answer(blocks: Sequence[Block]) -> Message:
    """A message of the assistant: its reasoning, its text and its calls."""
    thoughts = [one.thinking for one in blocks if isinstance(one, ThinkingBlock)]
    texts = [one for one in blocks if isinstance(one, TextBlock)]
    calls = [one.call for one in blocks if isinstance(one, ToolUse)]
    given: dict[str, Any] = {"reasoning_content": "".join(thoughts)} if thoughts else {}
    if texts or not calls:
        given["content"] = _parts(texts)
    return Message(role="assistant", tool_calls=calls, **given)


def _user(blocks: Sequence[Block]) -> Iterator[Message]:
    """Results of calls, and what the user says after them."""
    results = [one for one in blocks if isinstance(one, ToolResult)]
    texts = [one for one in blocks if isinstance(one, TextBlock)]
    if any(one.type == "text" for one in blocks[: len(results)]):
        raise ValueError("blocks of type tool_result must come before those of type text in messages of the user, got one after a text")
    for one in results:
        yield one.message
    if texts or not results:
        yield Message(role="user", content=_parts(texts))


def _parts(content: str | Sequence[TextBlock]) -> list[TextPart]:
    texts = [content] if isinstance(content, str) else [one.text for one in content]
    return [TextPart(type="text", text=text) for text in texts]
