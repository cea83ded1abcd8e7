"""OpenAI's requests and answers as pydantic models.

A field of a request that is not listed here, in ``tools`` or in ``unused`` is refused by its name. A null is the same as an absent field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from ..engine.parameters import PARAMETERS, SamplingParams
from .bodies import UNREAD, Body, QueuedBody, Text, one_of, packed
from .tools import CallAnswer, CallDelta, Tool, ToolCall, ToolChoice, check_tools
from .unused import UnusedChatFields, UnusedCompletionFields, UnusedFields, UnusedMessageFields, UnusedPartFields

DEFAULTS = SamplingParams()
Bias = Annotated[float, Field(ge=-100, le=100)]
Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True), AfterValidator(packed)]
Stops = Annotated[Text | Annotated[list[Text], Field(fail_fast=True)], one_of("a text or a list of texts, none of them empty")]
FinishReason = Literal["stop", "length", "tool_calls"]


def bounds(name: str) -> Any:
    """The range of a sampling parameter over HTTP, as pydantic's field."""
    one, _ = PARAMETERS[name]
    least, most = one.http or (one.least, one.most)
    return Field(ge=None if one.above else least, gt=least if one.above else None, le=None if most == math.inf else most)


Prompt = Annotated[
    str | Annotated[list[str], Field(min_length=1, fail_fast=True)] | Tokens | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)],
    one_of("a text, a list of texts, a list of tokens or a list of lists of tokens"),
]


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Counts of tokens so far in every piece. Not OpenAI's."""
    include_obfuscation: Annotated[Literal[False], one_of("false", "This server does not obfuscate.")] = False


class JsonSchema(Body):
    """A JSON schema with a name."""

    name: Text
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool = True


class ResponseFormat(Body):
    """What the text of an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> ResponseFormat:
        """A schema is given exactly where the type asks for one."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with type json_schema, and with no other")
        return self


class SamplingBody(QueuedBody, UnusedFields):
    """Fields that both endpoints share."""

    model: Text
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, bounds("n")] = DEFAULTS.n
    temperature: Annotated[float, bounds("temperature")] = DEFAULTS.temperature
    top_p: Annotated[float, bounds("top_p")] = DEFAULTS.top_p
    presence_penalty: Annotated[float, bounds("presence_penalty")] = DEFAULTS.presence_penalty
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] = DEFAULTS.frequency_penalty
    logit_bias: Annotated[dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Bias], Field(fail_fast=True)] = Field(default={})
    seed: Annotated[int, bounds("seed")] | None = DEFAULTS.seed
    stop: Stops = Field(default=[])
    response_format: ResponseFormat | None = None

    # beyond OpenAI's
    top_k: Annotated[int, bounds("top_k")] = DEFAULTS.top_k
    min_p: Annotated[float, bounds("min_p")] = DEFAULTS.min_p
    repetition_penalty: Annotated[float, bounds("repetition_penalty")] = DEFAULTS.repetition_penalty
    stop_token_ids: Annotated[list[Token], Field(fail_fast=True)] = Field(default=[])
    ignore_eos: bool = False
    min_tokens: Annotated[int, bounds("min_tokens")] = DEFAULTS.min_tokens
    prompt_logprobs: Annotated[int, bounds("prompt_logprobs")] | None = DEFAULTS.prompt_logprobs
    state: Text | None = None
    save_state: bool = False

    @model_validator(mode="after")
    def check_prompt_logprobs(self) -> SamplingBody:
        """They are in whole answers only."""
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError(f"prompt_logprobs must be absent with stream, got {self.prompt_logprobs}. Ask without stream")
        return self


class CompletionBody(SamplingBody, UnusedCompletionFields):
    """``POST /v1/completions``."""

    prompt: Prompt
    max_tokens: Annotated[int, bounds("max_tokens")] = DEFAULTS.max_tokens
    echo: bool = DEFAULTS.echo
    logprobs: Annotated[int, bounds("logprobs")] | None = DEFAULTS.logprobs

    @model_validator(mode="after")
    def check_best_of(self) -> CompletionBody:
        """All completions are returned."""
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(f"best_of must be n = {self.n}, got {self.best_of}. Ask for n of them with logprobs, and take the best")
        return self

    @property
    def prompts(self) -> list[str | Sequence[int]]:
        """A list of prompts."""
        found: Any = self.prompt
        several = isinstance(found, list) and not isinstance(found[0], int)
        return list(found) if several else [found]


class TextPart(Body, UnusedPartFields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body, UnusedMessageFields):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Annotated[list[TextPart], Field(fail_fast=True)], one_of("a text or a list of parts of type text")] = ""
    name: str | None = None
    tool_call_id: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = Field(default=[])
    parsed: Annotated[Any, UNREAD] = None
    """OpenAI's client adds it to answers that it parsed. It is not read."""

    # beyond OpenAI's
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def check_content(self) -> Message:
        """An answer may be empty."""
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError(f"content must be given with role {self.role}, got none")
        return self

    @model_validator(mode="after")
    def check_calls(self) -> Message:
        """Fields that belong to a role."""
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id must be given with role tool, and with no other")
        if (self.tool_calls or self.reasoning_content is not None) and self.role != "assistant":
            raise ValueError("tool_calls and reasoning_content must be given with role assistant only")
        return self

    @property
    def text(self) -> str:
        """The whole content."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


def check_results(messages: Sequence[Message], field: str) -> None:
    """Raise ValueError for the result of a call that is in no earlier message. ``field`` is the name of its ID."""
    called: set[str] = set()
    for one in messages:
        called |= {call.id for call in one.tool_calls}
        if one.tool_call_id is not None and one.tool_call_id not in called:
            raise ValueError(f"{field} must be of a call in an earlier message, got {one.tool_call_id[:60]!r}")


class ChatBody(SamplingBody, UnusedChatFields):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, bounds("logprobs")] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field(default=[])
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    # beyond OpenAI's
    chat_template_kwargs: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def check_pairs(self) -> ChatBody:
        """Fields that exclude or need each other."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError(f"max_tokens must be absent or max_completion_tokens = {self.max_completion_tokens}, got {self.max_tokens}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs must be given with logprobs only")
        return self

    @model_validator(mode="after")
    def check_calls(self) -> ChatBody:
        """The choice is one of the tools, and results are those of earlier calls."""
        check_tools([one.function for one in self.tools], self.tool_choice)
        check_results(self.messages, "tool_call_id")
        return self


class PromptDetails(BaseModel):
    """Where the tokens of a prompt came from."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(BaseModel):
    """Log probabilities of a completion, token by token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class TopLogprob(BaseModel):
    """A likely token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of a chat's answer."""

    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(BaseModel):
    """Log probabilities of a chat's answer."""

    content: list[TokenLogprob] = []


class ErrorFields(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class PromptLogprob(BaseModel):
    """One token at a place of a prompt."""

    logprob: float
    rank: int | None
    """1 is the most likely token. None: it is not among those that were asked for."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt; None for the first. The token itself comes first, then the most likely ones."""


class StateFields(BaseModel):
    """The saved state of a completion."""

    state: str | None = Field(default=None, exclude_if=lambda value: value is None)
    state_error: ErrorFields | None = Field(default=None, exclude_if=lambda value: value is None)
    """Why the state could not be saved, in its place."""


class CompletionChoice(StateFields):
    """One completion, or a piece of it."""

    index: int
    text: str = ""
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = Field(default=None, exclude_if=lambda value: value is None)


class CompletionAnswer(BaseModel):
    """The answer of ``/v1/completions``, or a piece of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice] = []
    usage: Usage | None = None


class ChatMessage(BaseModel):
    """The message that a chat gives."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = Field(default=None, exclude_if=lambda value: value is None)
    tool_calls: list[CallAnswer] | None = Field(default=None, exclude_if=lambda value: value is None)


class ChatChoice(StateFields):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatAnswer(BaseModel):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice] = []
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = Field(default=None, exclude_if=lambda value: value is None)


class Delta(BaseModel):
    """What a piece adds to a message."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=lambda value: value is None)
    content: str | None = Field(default=None, exclude_if=lambda value: value is None)
    reasoning_content: str | None = Field(default=None, exclude_if=lambda value: value is None)
    tool_calls: list[CallDelta] | None = Field(default=None, exclude_if=lambda value: value is None)


class ChatChunkChoice(StateFields):
    """A piece of one answer of a chat."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(BaseModel):
    """A piece of the answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice] = []
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    parent: str | None = None
    """Of a name with an initial state or an adapter: the model itself."""


class ModelList(BaseModel):
    """``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class StateCard(BaseModel):
    """A state that is kept."""

    id: str
    object: Literal["state"] = "state"
    created: int
    tokens: int
    bytes: int


class StateList(BaseModel):
    """``GET /v1/states``."""

    object: Literal["list"] = "list"
    data: list[StateCard]
