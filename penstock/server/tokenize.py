"""``/tokenize`` and ``/detokenize``: what a prompt consists of."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Request, Response
from pydantic import BaseModel, Field, model_validator

from .bodies import Body, Text, one_of
from .limits import parsed
from .logprobs import token_text
from .protocol import Message, Token
from .service import Service
from .threads import in_thread


class TokenizeBody(Body):
    """``POST /tokenize``: a text as ``/v1/completions`` reads it, or messages as ``/v1/chat/completions`` does."""

    model: Text | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: Annotated[Literal[True], one_of("true", "Templates end where an answer begins.")] = True

    @model_validator(mode="after")
    def check_pair(self) -> TokenizeBody:
        """One of two."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError(f"prompt must be given, or messages, got {'none' if self.prompt is None else 'both'}")
        return self


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: Text | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


class TokenizeAnswer(BaseModel):
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int
    """The most tokens of a prompt. The model itself has no limit."""
    tokens: list[int]
    token_strs: list[str] | None = None
    """As in log probabilities."""


class DetokenizeAnswer(BaseModel):
    """The answer of ``/detokenize``."""

    prompt: str


async def tokenize(service: Service, request: Request) -> Response:
    """Answer a request."""
    body = await parsed(request, TokenizeBody, "tokenize", service.limits)
    service.check_model(body.model or service.name)
    if body.messages is not None:
        text = await in_thread(service.chat_template("tokenize").render, body.messages)
        tokens = await service.tokens(text, "messages", special=bool(body.add_special_tokens))
    else:
        tokens = await service.tokens(body.prompt or "", "prompt", special=body.add_special_tokens is not False)
    return await in_thread(_answer, service, body, tokens)


def _answer(service: Service, body: TokenizeBody, tokens: list[int]) -> Response:
    """The answer. That of millions of tokens takes seconds."""
    texts = [token_text(service.tokenizer, token) for token in tokens] if body.return_token_strs else None
    answer = TokenizeAnswer(count=len(tokens), max_model_len=service.limits.prompt_tokens, tokens=tokens, token_strs=texts)
    return Response(answer.model_dump_json(), media_type="application/json")


async def detokenize(service: Service, request: Request) -> Response:
    """Answer a request."""
    body = await parsed(request, DetokenizeBody, "detokenize", service.limits)
    service.check_model(body.model or service.name)
    answer = DetokenizeAnswer(prompt=await service.text(body.tokens, "tokens"))
    return Response(answer.model_dump_json(), media_type="application/json")
