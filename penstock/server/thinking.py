"""Whether a model thinks before it answers, and for how many tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from ..engine.parameters import Constraint
from ..models.tokenizers import Tokenizer
from .answers import AnswerForm, ReasoningReader
from .errors import Refused
from .templates import Template


def thinking_variables(template: Template, wanted: Literal["enabled", "disabled", "adaptive"], function: str) -> dict[str, Any]:
    """Variables with which the template lets the model think, or not. "adaptive": it may think. Raises Refused for what it cannot."""
    form = template.reasoning
    if form is None:
        if wanted == "enabled":
            rule = "of type disabled or adaptive, because this server does not know how the model writes what it thinks"
            raise Refused(400, f"{function}: thinking must be {rule}, got {wanted}. Serve with --reasoning-parser.", param="thinking")
        return {}
    switch = next((name for name in form.switches if name in template.variables), None)
    if switch is not None:
        return {switch: wanted != "disabled"}
    if wanted == "disabled":
        rule = "of type enabled or adaptive, because the model's chat template has no variable that switches it off"
        raise Refused(400, f"{function}: thinking must be {rule}, got {wanted}. Leave it out.", param="thinking")
    return {}


class Thought:
    """A ``Prelude`` of the engine: the reasoning at the begin of an answer, with its markers and the white space around it."""

    def __init__(self, form: AnswerForm) -> None:
        assert form.reasoning is not None
        self._reader, self._held = ReasoningReader(form.reasoning, form.thinking, form.opened), ""

    def push(self, text: str) -> tuple[str, str]:
        """More of the reasoning, and the text after it."""
        self._held += text
        _, rest = self._reader.push(text)
        if self._reader.stage == "begin":
            return "", ""
        found, self._held = self._held[: len(self._held) - len(rest)], ""
        return found, rest

    def finish(self) -> tuple[str, str]:
        """The begin of a marker that did not become whole: no reasoning, unless that began in the prompt."""
        held, self._held = self._held, ""
        return (held, "") if self._reader.inside else ("", held)


class ThinkingBudget:
    """A constraint of the engine that ends the reasoning of an answer after some tokens: the tokens after these are its end.

    inner : Constraint, optional
        What may follow besides. None: any token.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, form: AnswerForm, budget: int, inner: Constraint | None) -> None:
        assert form.reasoning is not None
        self._reader = ReasoningReader(form.reasoning, form.thinking, form.opened)
        self._stream, self._left, self._inner = tokenizer.stream(), budget, inner
        self._encode = partial(tokenizer.encode, f"\n{form.reasoning.end}\n\n")
        self._end: deque[int] | None = None
        """The tokens that are left of the end of the reasoning. None: it has not begun."""
        self._any = b"\xff" * ((vocab_size + 7) // 8)
        self.mask = self._mask()

    def accept(self, token: int) -> bool:
        """Take a token; whether the inner constraint ends with it."""
        if self._inner is not None and self._inner.accept(token):
            return True
        if self._end:
            self._end.popleft()
        elif self._end is None and self._reader.stage in ("begin", "inside"):
            self._reader.push(self._stream.push(token))
            self._left -= 1
            if self._left <= 0 and self._reader.inside:
                self._end = deque(self._encode(after=[token]))
        self.mask = self._mask()
        return False

    def _mask(self) -> bytes:
        if self._end:
            mask = bytearray(len(self._any))
            mask[self._end[0] // 8] = 1 << self._end[0] % 8
            return bytes(mask)
        return self._any if self._inner is None else self._inner.mask


def within_budget(
    tokenizer: Tokenizer, vocab_size: int, form: AnswerForm, budget: int, inner: Callable[[], Constraint] | None
) -> Callable[[], Constraint]:
    """What makes the constraint of each completion."""
    return lambda: ThinkingBudget(tokenizer, vocab_size, form, budget, None if inner is None else inner())
