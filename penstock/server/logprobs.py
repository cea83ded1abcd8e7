"""Log probabilities in OpenAI's two forms, and those of prompts in vLLM's."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import to_json

from ..engine import TokenLogprobs
from ..models.tokenizer_json import LONGEST
from ..models.tokenizers import Tokenizer
from .protocol import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

PIECE = 256
"""Tokens whose log probabilities are written at once: milliseconds, in which nothing else is answered."""


def token_text(tokenizer: Tokenizer, token: int) -> str:
    r"""The text of a token; OpenAI's form of its bytes for a part of a character; ``token_id:7`` for a token that has none.

    >>> from penstock.models.tokenizers import Bytes
    >>> token_text(Bytes(), 97), token_text(Bytes(), 255), token_text(Bytes(257), 256)
    ('a', 'bytes:\\xff', 'token_id:256')
    """
    value = _value(tokenizer, token)
    if value is None:
        stream = tokenizer.stream([token])  # the text that it has after another token
        text = stream.push(token) + stream.finish()
        return text if text and "\ufffd" not in text else f"token_id:{token}"
    try:
        return value.decode() or f"token_id:{token}"
    except UnicodeDecodeError:
        shown = (chr(byte) if 32 <= byte < 127 and byte != ord("\\") else f"\\x{byte:02x}" for byte in value)
        return f"bytes:{''.join(shown)}"


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    """The bytes of a token, also where they are a part of a character; None if the tokenizer does not tell."""
    value = _value(tokenizer, token)
    if value is None:
        text = token_text(tokenizer, token)
        return None if text.startswith("token_id:") else list(text.encode())
    return list(value) or None


def _value(tokenizer: Tokenizer, token: int) -> bytes | None:
    """The bytes of a token. The model may have more tokens than the tokenizer."""
    return tokenizer.token_bytes[token] if token < tokenizer.vocab_size else b""


def echoed_begin(tokenizer: Tokenizer, text: str, tokens: Sequence[int]) -> int:
    """How many more characters a prompt has at its begin than its tokens: some files add a space, and some remove one."""
    found = tokenizer.decode(tokens[:LONGEST])
    return (len(text) - len(text.lstrip(" "))) - (len(found) - len(found.lstrip(" ")))


def _divided(value: bytes) -> tuple[str, bytes]:
    """The text of whole characters, and an incomplete one at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(value), decoder.getstate()[0]


class CompletionWriter:
    """Writes log probabilities of one completion, piece by piece. Keeps the place in the text.

    after : list of int
        Tokens before the text.
    begin : int
        How many more characters the text has at its begin than its tokens: see ``echoed_begin``.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = (), begin: int = 0) -> None:
        self._tokenizer, self._stream, self._offset, self._begin = tokenizer, tokenizer.stream(after), 0, begin
        self._held = b""
        """Bytes of the last tokens, whose text the stream has not given."""

    def write(self, found: Iterable[TokenLogprobs | None], tokens: Iterable[int]) -> CompletionLogprobs:
        """Log probabilities of the next tokens. None: of a token with nothing before it."""
        piece = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for one, token in zip(found, tokens):
            piece.tokens.append(token_text(self._tokenizer, token))
            piece.token_logprobs.append(None if one is None else one.logprob)
            piece.top_logprobs.append(None if one is None else self._top(one))
            piece.text_offset.append(self._offset + self._held_size(token))
            self.skip([token])
        return piece

    def skip(self, tokens: Iterable[int]) -> None:
        """Take tokens whose log probabilities are written elsewhere."""
        for token in tokens:
            if token < self._tokenizer.vocab_size:
                text, value = self._stream.push(token), _value(self._tokenizer, token)
                self._offset += len(text)
                if value != b"":
                    self._offset, self._begin = self._offset + self._begin, 0
                self._held += value or b""
                if text and self._held:
                    self._held = b"" if value is None or self._held.isascii() else _divided(self._held)[1]

    def _held_size(self, token: int) -> int:
        """The size of the held text before a token. A part of a character has the place of its character."""
        if not self._held:
            return 0
        value = _value(self._tokenizer, token)
        if value is None:  # it ends a run of tokens of bytes
            try:
                return len(self._held.decode())
            except UnicodeDecodeError:
                return len(self._held)  # U+FFFD for each
        text, rest = _divided(self._held + value[:1])  # with the first byte, which may or may not belong to the character before it
        return len(text) - (value != b"" and not rest)

    def to_json(self, found: Sequence[TokenLogprobs | None], tokens: Sequence[int]) -> str:
        """The same as JSON, for many tokens: their objects are not in memory together, and Python's lock is never held for long."""
        columns: dict[str, list[str]] = {name: [] for name in CompletionLogprobs.model_fields}
        for n in range(0, len(found), PIECE):
            piece = self.write(found[n : n + PIECE], tokens[n : n + PIECE])
            for name, column in columns.items():
                column.append(to_json(getattr(piece, name), inf_nan_mode="null").decode()[1:-1])
        return "{" + ",".join(f'"{name}":[{",".join(column)}]' for name, column in columns.items()) + "}"

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in one.top:
            text = token_text(self._tokenizer, token)
            found[text if text not in found else f"token_id:{token}"] = logprob
        return found


def chat_logprobs(tokenizer: Tokenizer, found: Iterable[TokenLogprobs]) -> ChatLogprobs:
    """Log probabilities of tokens of a chat's answer."""

    def of(token: int, logprob: float) -> dict[str, Any]:
        return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": token_bytes(tokenizer, token)}

    return ChatLogprobs(
        content=[TokenLogprob(**of(one.token, one.logprob), top_logprobs=[TopLogprob(**of(*pair)) for pair in one.top]) for one in found]
    )


def shortened(found: Iterable[TokenLogprobs | None], most: int) -> list[TokenLogprobs | None]:
    """Log probabilities with so many most likely tokens at each place."""
    return [one and one._replace(top=one.top[:most]) for one in found]


def prompt_json(tokenizer: Tokenizer, found: Iterable[TokenLogprobs | None] | None, most: int | None) -> dict[str, str]:
    """The field of a prompt's log probabilities, with ``most`` most likely tokens, as JSON; none if they were not asked for."""
    if found is None or most is None:
        return {}
    places = (one and _of_prompt(tokenizer, one._replace(top=one.top[:most])) for one in found)
    return {"prompt_logprobs": f"[{','.join(to_json(place, inf_nan_mode='null').decode() for place in places)}]"}


def _of_prompt(tokenizer: Tokenizer, one: TokenLogprobs) -> dict[str, dict[str, Any]]:
    """Fields of ``protocol.PromptLogprob`` by token."""
    ranks = {token: rank for rank, (token, _) in enumerate(one.top, 1)}
    return {
        str(token): {"logprob": logprob, "rank": ranks.get(token), "decoded_token": token_text(tokenizer, token)}
        for token, logprob in [(one.token, one.logprob), *one.top]
    }


def chat_json(tokenizer: Tokenizer, found: Sequence[TokenLogprobs]) -> str:
    """The same as JSON, for many tokens."""
    pieces = (chat_logprobs(tokenizer, found[n : n + PIECE]).content for n in range(0, len(found), PIECE))
    return '{"content":[' + ",".join(one.model_dump_json() for piece in pieces for one in piece) + "]}"
