"""Requests of Anthropic's ``/v1/messages`` as pydantic models. ``messages_blocks`` has their contents, ``messages_output`` the answers."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from .bodies import Body, QueuedBody, Text, one_of
from .messages_blocks import TextContent, Turn, to_messages
from .protocol import JsonSchema, Message, ResponseFormat, SamplingBody, check_results
from .tools import Function, FunctionName, NamedFunction, NamedTool, check_tools
from .unused import Settings, Texts


class Tool(Body):
    """A tool of the client."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False

    # of these, only values that ask for nothing here pass
    cache_control: Settings | None = None
    allowed_callers: Annotated[list[Literal["direct"]] | None, one_of("['direct']", "This server runs no code.")] = None
    defer_loading: Annotated[Literal[False], one_of("false", "This server does not search tools.")] = False
    eager_input_streaming: Annotated[Literal[True], one_of("true", "Inputs are streamed as they come.")] = True
    input_examples: Annotated[list[Any], Field(max_length=0), one_of("empty", "Put examples into the description.")] = Field([])

    @property
    def function(self) -> Function:
        """The same in a chat."""
        return Function(name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict)


class Choice(Body):
    """Whether an answer calls tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def check_name(self) -> Choice:
        """A name is given exactly where the type asks for one."""
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("tool_choice must have a name with type tool, and with no other")
        return self

    @property
    def chat(self) -> str | NamedTool:
        """The same in a chat."""
        if self.name is not None:
            return NamedTool(type="function", function=NamedFunction(name=self.name))
        return "required" if self.type == "any" else self.type


class Thinking(Body):
    """Whether the model thinks before it answers, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Annotated[Literal["summarized"] | None, one_of("'summarized'", "This server shows what the model thinks.")] = None

    @model_validator(mode="after")
    def check_budget(self) -> Thinking:
        """A budget is for a model that thinks in any case."""
        if self.budget_tokens is not None and self.type != "enabled":
            raise ValueError(f"thinking.budget_tokens must be absent with type {self.type}, got {self.budget_tokens}")
        return self


class OutputFormat(Body):
    """The schema of an answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    @property
    def chat(self) -> ResponseFormat:
        """The same in a chat."""
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(name="answer", schema=self.schema_))


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
    user_profile_id: str | None = None
    container: Annotated[None, one_of("absent", "This server runs no code.")] = None
    diagnostics: Annotated[None, one_of("absent", "usage.cache_read_input_tokens tells what the cache had.")] = None
    thread: Annotated[None, one_of("absent", "Send all messages; with the client's tool runner, set thread=False.")] = None
    inference_geo: Annotated[None, one_of("absent", "The model runs where this server does.")] = None


class CountBody(Body, UnusedMessagesFields):
    """``POST /v1/messages/count_tokens``."""

    model: Text
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: TextContent | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field([])
    tool_choice: Choice = Choice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def check_messages(self) -> CountBody:
        """An answer is a message of its own, and results are those of earlier calls."""
        if self.messages[-1].role == "assistant":
            rule = "messages must end with one of the user, got one of the assistant"
            raise ValueError(f"{rule}. Ask in it to continue the answer")
        check_results(self.conversation, "tool_use_id")
        return self

    @model_validator(mode="after")
    def check_choice(self) -> CountBody:
        """The choice is one of the tools."""
        check_tools(self.functions, self.tool_choice.chat)
        return self

    @cached_property
    def conversation(self) -> list[Message]:
        """The messages of a chat."""
        return to_messages(self.system, self.messages)

    @property
    def functions(self) -> list[Function]:
        """The tools of a chat."""
        return [one.function for one in self.tools]

    @property
    def response_format(self) -> ResponseFormat | None:
        """That of a chat."""
        return None if self.output_config is None or self.output_config.format is None else self.output_config.format.chat


class MessagesBody(CountBody, QueuedBody):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: Annotated[list[Text], Field(fail_fast=True)] = Field([])
    temperature: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def check_budget(self) -> MessagesBody:
        """Some tokens are left for the answer."""
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise ValueError(f"thinking.budget_tokens must be less than max_tokens = {self.max_tokens}, got {budget}")
        return self

    @property
    def sampling(self) -> SamplingBody:
        """The fields that all endpoints share."""
        names = {"model", "temperature", "top_k", "top_p", "cache_salt", "priority"}
        return SamplingBody.model_validate({**self.model_dump(include=names, exclude_unset=True), "stop": self.stop_sequences})


class TokenCount(BaseModel):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
