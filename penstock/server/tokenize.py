"""``/tokenize`` and ``/detokenize``: what a prompt consists of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import Request, Response
from pydantic import AfterValidator, BaseModel, Field, model_validator

from ..errors import InvalidArgument
from .bodies import Body, Text, one_of, packed
from .errors import refusal
from .limits import parsed
from .logprobs import token_text
from .protocol import Message, Token
from .service import Service
from .texts import Texts, decoded, encoded
from .writing import to_pieces, written


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
    tokens: Annotated[list[Token], Field(fail_fast=True), AfterValidator(packed)]


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
    body = await parsed(request, TokenizeBody, "tokenize", service.limits, service.processes)
    service.check_model(body.model or service.name)
    if body.messages is not None:
        service.chat_template("tokenize")
    try:
        content = await service.work(_tokenized, service.texts, body, service.limits.prompt_tokens)
    except InvalidArgument as error:
        raise refusal(error, "prompt" if body.messages is None else None) from error
    return Response(content, media_type="application/json")


def _tokenized(given: Texts, body: TokenizeBody, most: int) -> bytes:
    """The answer as JSON. That of millions of tokens takes seconds."""
    if body.messages is None:
        tokens = encoded(given, body.prompt or "", body.add_special_tokens is not False)
    else:
        assert given.template is not None
        tokens = encoded(given, given.template.render(body.messages), bool(body.add_special_tokens))
    texts = [token_text(given.tokenizer, token) for token in tokens] if body.return_token_strs else None
    answer = TokenizeAnswer(count=len(tokens), max_model_len=most, tokens=[])
    names = {"tokens": to_pieces(tokens), **({} if texts is None else {"token_strs": to_pieces(texts)})}
    return written(answer, **names).encode()


async def detokenize(service: Service, request: Request) -> Response:
    """Answer a request."""
    body = await parsed(request, DetokenizeBody, "detokenize", service.limits, service.processes)
    service.check_model(body.model or service.name)
    try:
        content = await service.work(_detokenized, service.texts, body.tokens)
    except InvalidArgument as error:
        raise refusal(error, "tokens") from error
    return Response(content, media_type="application/json")


def _detokenized(given: Texts, tokens: Sequence[int]) -> bytes:
    """The answer as JSON."""
    return DetokenizeAnswer(prompt=decoded(given, tokens)).model_dump_json().encode()
