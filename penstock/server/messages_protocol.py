"""Requests and answers of Anthropic's ``/v1/messages`` as pydantic models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from .bodies import Body, Text, one_of
from .protocol import ChatBody, Message, TextPart
from .unused import Nothing, Settings, Texts

Reason = Literal["end_turn", "max_tokens", "stop_sequence"]


class Block(Body):
    """A part of a content. Nothing reads ``cache_control``: the engine caches prefixes by itself."""

    type: Literal["text"]
    text: str
    cache_control: Settings | None = None
    citations: Nothing = Field([])


Content = Annotated[str | Annotated[list[Block], Field(fail_fast=True)], one_of("a text or a list of blocks of type text")]


def _parts(content: str | Sequence[Block]) -> list[TextPart]:
    texts = [content] if isinstance(content, str) else [one.text for one in content]
    return [TextPart(type="text", text=text) for text in texts]


class Turn(Body):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Disabled(Body):
    """No thinking."""

    type: Literal["disabled"]


class NoChoice(Body):
    """A choice that needs no tools."""

    type: Literal["none", "auto"]
    disable_parallel_tool_use: bool = False


class OutputFormat(Body):
    """The schema of an answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """What the text of an answer must be."""

    format: OutputFormat | None = None
    effort: Annotated[None, one_of("absent", "Ask in a message for more or fewer thoughts.")] = None


class UnusedMessagesFields(BaseModel):
    """Fields that cannot change an answer of this server pass with the values that ask for nothing, as in ``unused``."""

    cache_control: Settings | None = None
    metadata: Texts | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Annotated[Literal["standard"] | None, one_of("'standard'", "This server has one speed.")] = None
    thinking: Annotated[Disabled | None, one_of("of type disabled", "Ask in a message for thoughts.")] = None
    tools: Nothing = Field([])
    tool_choice: Annotated[NoChoice | None, one_of("of type none or auto", "There are no tools to choose from.")] = None
    user_profile_id: str | None = None
    container: Annotated[None, one_of("absent", "This server runs no code.")] = None
    diagnostics: Annotated[None, one_of("absent", "usage.cache_read_input_tokens tells what the cache had.")] = None
    inference_geo: Annotated[None, one_of("absent", "The model runs where this server does.")] = None


class CountBody(Body, UnusedMessagesFields):
    """``POST /v1/messages/count_tokens``."""

    model: Text
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: Content | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def check_last(self) -> CountBody:
        """An answer is a message of its own."""
        if self.messages[-1].role == "assistant":
            rule = "messages must end with one of the user, got one of the assistant"
            raise ValueError(f"{rule}. Ask in it to continue the answer")
        return self

    def conversation(self) -> list[Message]:
        """The messages, with the system's first. Neighbours of one role are one message."""
        turns = [(one.role, _parts(one.content)) for one in self.messages]
        found: list[tuple[Any, list[TextPart]]] = [] if self.system is None else [("system", _parts(self.system))]
        for role, parts in turns:
            if found and found[-1][0] == role:
                found[-1][1].extend(parts)
            else:
                found.append((role, parts))
        return [Message(role=role, content=parts) for role, parts in found]


class MessagesBody(CountBody):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: Annotated[list[Text], Field(fail_fast=True)] = Field([])
    temperature: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    # beyond Anthropic's
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0

    def chat(self) -> ChatBody:
        """The same as a request of OpenAI's."""
        output = None if self.output_config is None else self.output_config.format
        form = None if output is None else {"type": "json_schema", "json_schema": {"name": "answer", "schema": output.schema_}}
        same = {name: getattr(self, name) for name in ("model", "max_tokens", "temperature", "top_k", "top_p", "cache_salt", "priority")}
        return ChatBody.model_validate(
            {**same, "messages": self.conversation(), "stop": self.stop_sequences, "response_format": form}
        )  # fmt: skip


class TokenCount(BaseModel):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int


class InputUsage(BaseModel):
    """Counts of tokens. Those of the prompt are read from the cache or computed."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int


class TextBlock(BaseModel):
    """A block of an answer."""

    type: Literal["text"] = "text"
    text: str = ""


class MessageAnswer(BaseModel):
    """The answer of ``/v1/messages``, or its begin."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: Reason | None = None
    stop_sequence: str | None = None
    usage: InputUsage


class StreamEvent(BaseModel):
    """An event of a stream. Its name is its type."""

    type: str


class MessageStart(StreamEvent):
    """The first one."""

    type: str = "message_start"
    message: MessageAnswer


class BlockStart(StreamEvent):
    """The begin of the text."""

    type: str = "content_block_start"
    index: int = 0
    content_block: TextBlock = TextBlock()


class Ping(StreamEvent):
    """It says nothing."""

    type: str = "ping"


class TextDelta(BaseModel):
    """More text."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class BlockDelta(StreamEvent):
    """A piece of the text."""

    type: str = "content_block_delta"
    index: int = 0
    delta: TextDelta


class BlockStop(StreamEvent):
    """The end of the text."""

    type: str = "content_block_stop"
    index: int = 0


class Stop(BaseModel):
    """Why an answer ended."""

    stop_reason: Reason
    stop_sequence: str | None


class MessageDelta(StreamEvent):
    """What is known at the end."""

    type: str = "message_delta"
    delta: Stop
    usage: InputUsage


class MessageStop(StreamEvent):
    """The last one."""

    type: str = "message_stop"
