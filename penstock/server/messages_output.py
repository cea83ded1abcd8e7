"""Answers of Anthropic's ``/v1/messages``: blocks that are made of the pieces of an answer, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import from_json

from .answers import Piece
from .streaming import NamedEvent
from .tools import call_id

Reason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
INVALID = "INVALID_JSON"
"""The name of arguments that are no JSON, in an input. Anthropic recommends it."""


class InputUsage(BaseModel):
    """Counts of tokens. Those of the prompt are read from the cache or computed."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int


class AnswerText(BaseModel):
    """A text."""

    type: Literal["text"] = "text"
    text: str = ""


class AnswerThinking(BaseModel):
    """What the model thought. Clients expect a signature, and send it back."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: Literal[""] = ""


class AnswerUse(BaseModel):
    """A call."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


AnswerBlock = AnswerText | AnswerThinking | AnswerUse


class MessageAnswer(BaseModel):
    """The answer of ``/v1/messages``, or its begin."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: Reason | None = None
    stop_sequence: str | None = None
    usage: InputUsage


class MessageStart(NamedEvent):
    """The first one."""

    type: str = "message_start"
    message: MessageAnswer


class Ping(NamedEvent):
    """It says nothing."""

    type: str = "ping"


class BlockStart(NamedEvent):
    """The begin of a block."""

    type: str = "content_block_start"
    index: int
    content_block: AnswerBlock


class TextDelta(BaseModel):
    """More text."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(BaseModel):
    """More reasoning."""

    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class InputDelta(BaseModel):
    """More of the arguments of a call."""

    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class BlockDelta(NamedEvent):
    """A piece of a block."""

    type: str = "content_block_delta"
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(NamedEvent):
    """The end of a block."""

    type: str = "content_block_stop"
    index: int


class Stop(BaseModel):
    """Why an answer ended."""

    stop_reason: Reason
    stop_sequence: str | None


class MessageDelta(NamedEvent):
    """What is known at the end."""

    type: str = "message_delta"
    delta: Stop
    usage: InputUsage


class MessageStop(NamedEvent):
    """The last one."""

    type: str = "message_stop"


class BlockWriter:
    """Makes the blocks of an answer, and the events of a stream."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._text = ""
        """Of the last block."""

    @property
    def called(self) -> bool:
        """Whether there is a call."""
        return any(one.type == "tool_use" for one in self.blocks)

    def write(self, piece: Piece) -> Iterator[NamedEvent]:
        """Events of a piece."""
        if piece.kind == "call":
            yield from self._begin(AnswerUse(id=call_id("toolu"), name=piece.text))
            return
        if piece.kind == "content" and not isinstance(self._last, AnswerText):
            yield from self._begin(AnswerText())
        elif piece.kind == "reasoning" and not isinstance(self._last, AnswerThinking):
            yield from self._begin(AnswerThinking())
        self._text += piece.text
        yield BlockDelta(index=len(self.blocks) - 1, delta=_delta(piece))

    def finish(self) -> Iterator[NamedEvent]:
        """Events of the end. An answer has a block at least."""
        if not self.blocks:
            yield from self._begin(AnswerText())
        yield from self._close()

    @property
    def _last(self) -> AnswerBlock | None:
        return self.blocks[-1] if self.blocks else None

    def _begin(self, block: AnswerBlock) -> Iterator[NamedEvent]:
        yield from self._close()
        self.blocks.append(block)
        self._text = ""
        yield BlockStart(index=len(self.blocks) - 1, content_block=block.model_copy())

    def _close(self) -> Iterator[NamedEvent]:
        last = self._last
        if last is None:
            return
        if isinstance(last, AnswerText):
            last.text = self._text
        elif isinstance(last, AnswerThinking):
            last.thinking = self._text
        else:
            last.input = arguments(self._text)
        yield BlockStop(index=len(self.blocks) - 1)


def _delta(piece: Piece) -> TextDelta | ThinkingDelta | InputDelta:
    if piece.kind == "content":
        return TextDelta(text=piece.text)
    return ThinkingDelta(thinking=piece.text) if piece.kind == "reasoning" else InputDelta(partial_json=piece.text)


def arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object: of those that are cut what is whole, as Anthropic's client reads them from a stream.

    >>> arguments('{"city": "Oslo", "country": "No')
    {'city': 'Oslo'}
    >>> arguments('{"city": Oslo}')
    {'INVALID_JSON': '{"city": Oslo}'}
    """
    try:
        found = from_json(text, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {INVALID: text}
