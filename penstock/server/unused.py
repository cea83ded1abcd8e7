"""Fields of OpenAI's requests that nothing reads, because they cannot change an answer of this server.

They pass with the values that ask for nothing, or for nothing here. Other values are refused, with what to do; those of None always are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from .bodies import UNREAD, one_of

TEXTS_ONLY = "This server reads and writes texts only."
Texts = Annotated[dict[str, str], one_of("an object of texts"), UNREAD]
Settings = Annotated[dict[str, str], one_of("an object of texts", "The engine caches prefixes by itself."), UNREAD]
Nothing = Annotated[list[Any], Field(max_length=0), one_of("empty", "This server does not support it.")]


class UnusedFields(BaseModel):
    """Of both endpoints."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: Texts | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Settings | None = None
    prompt_cache_retention: str | None = None
    service_tier: Annotated[Literal["auto", "default"] | None, one_of("'auto' or 'default'", "This server has one tier.")] = None
    store: Annotated[Literal[False] | None, one_of("false", "This server does not store answers.")] = None


class UnusedCompletionFields(BaseModel):
    """Of ``/v1/completions``. ``best_of`` must be n."""

    best_of: int | None = None
    suffix: Annotated[Literal[""] | None, one_of("empty", "Tell the model in the prompt what follows.")] = None


class UnusedChatFields(BaseModel):
    """Of ``/v1/chat/completions``."""

    functions: Nothing = []
    function_call: Annotated[Literal["none", "auto"] | None, one_of("'none' or 'auto'", "There are no functions to call.")] = None
    modalities: Annotated[list[Literal["text"]] | None, one_of("['text']", TEXTS_ONLY)] = None
    prediction: Annotated[dict[str, Any] | None, one_of("an object"), UNREAD] = None
    reasoning_effort: Annotated[Literal["none"] | None, one_of("'none'", "Ask in a message for more or fewer thoughts.")] = None
    verbosity: Annotated[Literal["medium"] | None, one_of("'medium'", "Ask in a message for a longer or shorter answer.")] = None
    audio: Annotated[None, one_of("absent", TEXTS_ONLY)] = None
    moderation: Annotated[None, one_of("absent", "This server does not moderate.")] = None
    web_search_options: Annotated[None, one_of("absent", "This server does not search. Put what was found into a message.")] = None


class UnusedMessageFields(BaseModel):
    """Of a message, such as an earlier answer that is sent back as it came."""

    annotations: Nothing = []
    function_call: Annotated[None, one_of("absent", "This server does not support it.")] = None
    audio: Annotated[None, one_of("absent", TEXTS_ONLY)] = None
    refusal: Annotated[None, one_of("absent", "Put its text into content.")] = None


class UnusedPartFields(BaseModel):
    """Of a part of a message."""

    prompt_cache_breakpoint: Settings | None = None
