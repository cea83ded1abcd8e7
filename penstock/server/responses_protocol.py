"""Requests and answers of ``/v1/responses``, as OpenAI has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from .bodies import Body, QueuedBody, Text, one_of
from .protocol import JsonSchema, Message, ResponseFormat
from .streaming import NamedEvent
from .tools import CalledFunction, Function, NamedFunction, NamedTool, ToolCall, check_tools
from .unused import Settings

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    one_of("an object of at most 16 texts of 512 characters, with names of 64"), Field(max_length=16),
]  # fmt: skip


class Part(Body):
    """A part of a message."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default=[])
    logprobs: Annotated[list[Any], Field(max_length=0)] = Field(default=[])


Content = Annotated[str | Annotated[list[Part], Field(fail_fast=True)], one_of("a text or a list of parts that are texts")]


def text_of(content: str | list[Part]) -> str:
    """The whole text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Item(Body):
    """An item of the input: a message, a call, the result of one, or reasoning. Items of an output can be sent back as they are."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: Annotated[list[Part], Field(fail_fast=True)] = Field(default=[])

    @model_validator(mode="after")
    def check_fields(self) -> Item:
        """Fields of the type."""
        needed = {
            "message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"), "reasoning": (),
        }[self.type]  # fmt: skip
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be given with type {self.type}, got none")
        allowed = {"type", "id", "status", *needed, *(("summary", "content") if self.type == "reasoning" else ())}
        for name in self.model_fields_set - allowed:
            raise ValueError(f"{name} must be absent with type {self.type}")
        return self


def _items(value: Any) -> Any:
    """A text is a message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class FunctionTool(Function):
    """A tool."""

    type: Literal["function"]


class NamedChoice(NamedFunction):
    """The tool that an answer must call."""

    type: Literal["function"]


class TextFormat(Body):
    """What the text of an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool = True

    @property
    def chat(self) -> ResponseFormat:
        """The same in a chat."""
        schema = None if self.schema_ is None else JsonSchema(name=self.name or "answer", schema=self.schema_)
        return ResponseFormat(type=self.type, json_schema=schema)

    @model_validator(mode="after")
    def check_schema(self) -> TextFormat:
        """A schema is given exactly where the type asks for one."""
        if (self.type == "json_schema") != (self.schema_ is not None and self.name is not None):
            raise ValueError("name and schema must be given with type json_schema, and with no other")
        return self


class TextOptions(Body):
    """Options of the text of an answer."""

    format: TextFormat | None = None
    verbosity: Annotated[Literal["medium"], one_of("'medium'", "Ask in the input for a longer or shorter answer.")] = "medium"


class ResponseBody(QueuedBody):
    """``POST /v1/responses``. What is not listed here is refused by its name."""

    model: Text
    input: Annotated[list[Item], Field(min_length=1, fail_fast=True), BeforeValidator(_items)]
    instructions: str | None = None
    previous_response_id: Text | None = None
    store: bool = True
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] = Field(default=[])
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedChoice, one_of("'auto', 'none', 'required' or {'type': 'function', 'name': NAME}")
    ] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=TextOptions)
    metadata: Metadata = Field(default={})

    # of these, only values that ask for nothing here pass
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Settings | None = None
    service_tier: Annotated[Literal["auto", "default"], one_of("'auto' or 'default'", "This server has one tier.")] = "auto"
    truncation: Annotated[Literal["disabled"], one_of("'disabled'", "A state has no window to cut.")] = "disabled"
    background: Annotated[Literal[False], one_of("false", "This server answers at once.")] = False
    include: Annotated[list[Any], Field(max_length=0), one_of("empty", "This server does not support it.")] = Field(default=[])
    top_logprobs: Annotated[Literal[0], one_of("0", "/v1/chat/completions has log probabilities.")] = 0

    @model_validator(mode="after")
    def check_choice(self) -> ResponseBody:
        """The choice is one of the tools."""
        check_tools(self.tools, self.choice)
        return self

    @property
    def choice(self) -> str | NamedTool:
        """The choice as chats have it."""
        if isinstance(self.tool_choice, str):
            return self.tool_choice
        return NamedTool(type="function", function=NamedFunction(name=self.tool_choice.name))


def to_messages(items: list[Item]) -> list[Message]:
    """Items as messages of a chat. Calls and reasoning belong to the message of the assistant beside them."""
    found: list[dict[str, Any]] = []

    def answer(part: str) -> dict[str, Any]:
        """The message of the assistant that a part belongs to."""
        last = found[-1] if found and found[-1]["role"] == "assistant" else None
        order = ("reasoning_content", "content", "tool_calls")
        if last is None or any(name in last for name in order[order.index(part) + (part == "tool_calls") :]):
            found.append({"role": "assistant"})
        return found[-1]

    for item in items:
        if item.type == "function_call":
            function = CalledFunction(name=item.name or "", arguments=item.arguments or "")
            answer("tool_calls").setdefault("tool_calls", []).append(ToolCall(id=item.call_id or "", function=function))
        elif item.type == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output or "")})
        elif item.type == "reasoning":
            answer("reasoning_content")["reasoning_content"] = text_of(item.content or item.summary)
        elif item.role == "assistant":
            answer("content")["content"] = text_of(item.content or "")
        else:
            found.append({"role": item.role, "content": text_of(item.content or "")})
    return [Message(**one) for one in found]


class OutputItem(BaseModel):
    """An item of an answer: a message, a call or reasoning."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"


class InputDetails(BaseModel):
    """Where the tokens of the input came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    """Reasoning is not counted apart from the rest."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class Incomplete(BaseModel):
    """Why an answer is not whole."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseAnswer(BaseModel):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: dict[str, Any] | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = Field(default=[])
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class StreamEvent(NamedEvent):
    """An event of a stream."""

    model_config = ConfigDict(extra="allow")

    sequence_number: int


class Link(BaseModel):
    """What the next response has to know of one, beside its state."""

    instructions: str | None
    shown: list[dict[str, Any]]
    """Functions that the model saw."""
    tail: str
    """What the state has after the answer: the text that ended it."""
    names: dict[str, str]
    """Of the functions of calls, by their IDs."""
