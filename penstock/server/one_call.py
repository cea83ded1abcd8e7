"""The end of an answer that may have one call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..engine.parameters import Constraint
from ..models.tokenizers import Tokenizer
from .answers import AnswerForm, AnswerReader


class OneCall:
    """A constraint of the engine that ends an answer with its first call.

    inner : Constraint, optional
        What may follow besides. None: any token.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, form: AnswerForm, inner: Constraint | None) -> None:
        self._reader, self._stream, self._inner = AnswerReader(form), tokenizer.stream(), inner
        self._any = b"\xff" * ((vocab_size + 7) // 8)

    @property
    def mask(self) -> bytes:
        """Tokens that may follow."""
        return self._any if self._inner is None else self._inner.mask

    def accept(self, token: int) -> bool:
        """Take a token; whether the call, or the inner constraint, ends with it."""
        if self._inner is not None and self._inner.accept(token):
            return True
        deque(self._reader.push(self._stream.push(token)), maxlen=0)
        return self._reader.called


def with_one_call(
    tokenizer: Tokenizer, vocab_size: int, form: AnswerForm, inner: Callable[[], Constraint] | None
) -> Callable[[], Constraint]:
    """What makes the constraint of each completion."""
    return lambda: OneCall(tokenizer, vocab_size, form, None if inner is None else inner())
