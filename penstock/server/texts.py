"""Tokens and texts of requests. Worker processes have the tokenizer and the chat template from their beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..models.tokenizers import Tokenizer, text_after
from .bodies import packed
from .templates import Template


@dataclass(frozen=True)
class Texts:
    """What makes tokens and texts. In a job of a worker it is a reference to its own."""

    tokenizer: Tokenizer
    template: Template | None

    def __reduce__(self) -> tuple[Callable[[], Texts], tuple[()]]:
        return own_texts, ()


_OWN: list[Texts] = []


def own(texts: Texts) -> None:
    """Give this process its texts."""
    _OWN.append(texts)


def own_texts() -> Texts:
    """Those of this process."""
    return _OWN[-1]


def encoded(texts: Texts, text: str, special: bool, after: Sequence[int] = ()) -> Sequence[int]:
    """Tokens of a text; of an empty one with ``special``, the end of the text before. As for ``Tokenizer.encode``."""
    found = texts.tokenizer.encode(text, special, after)
    if not found and special and texts.tokenizer.end_of_text is not None:
        return [texts.tokenizer.end_of_text]
    return packed(found)


def decoded(texts: Texts, tokens: Sequence[int], after: Sequence[int] = ()) -> str:
    """The text of tokens that follow those of ``after``."""
    return text_after(texts.tokenizer, tokens, after) if after else texts.tokenizer.decode(tokens)
