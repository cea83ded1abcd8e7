"""How families of models write calls of functions and reasoning. A family is recognised from the source of its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CallForm:
    """How a family of models writes calls: JSON objects with a name and arguments, perhaps between markers."""

    name: str
    begin: str
    """The text before a call. Empty: a call is at the begin of an answer, or nowhere."""
    end: str
    arguments: Literal["arguments", "parameters"]
    """The name of the field."""
    signs: tuple[str, ...]
    """A template with one of these texts is of this family..."""
    other: tuple[str, ...] = ()
    """...unless it has one of these."""
    ignored: str = ""
    """A text that may stand at the begin of an answer with a call."""


@dataclass(frozen=True)
class ReasoningForm:
    """How a family of models marks what it thinks before it answers."""

    name: str
    begin: str
    end: str
    switches: tuple[str, ...]
    """Variables that templates of it may have: true lets the model think, false does not."""

    def begun(self, prompt: str) -> bool:
        """Whether a prompt ends inside of it."""
        return prompt.rstrip().endswith(self.begin)

    def opened(self, prompt: str) -> str:
        """The marker without its last character, if a prompt ends with that: the answer writes the rest of it."""
        return self.begin[:-1] if prompt.endswith(self.begin[:-1]) else ""


CALLS = {
    form.name: form
    for form in (
        CallForm("hermes", "<tool_call>", "</tool_call>", "arguments", ("<tool_call>",), other=("<function=", "<arg_key>")),
        CallForm("llama", "", "", "parameters", ("<|python_tag|>", '"parameters": dictionary'), ignored="<|python_tag|>"),
    )
}
"""All that ``--tool-parser`` knows."""
REASONING = {form.name: form for form in (ReasoningForm("think", "<think>", "</think>", ("enable_thinking", "thinking")),)}
"""All that ``--reasoning-parser`` knows."""


def recognised_calls(template: str) -> CallForm | None:
    """The family of a template, from its source."""
    for form in CALLS.values():
        if any(sign in template for sign in form.signs) and not any(sign in template for sign in form.other):
            return form
    return None


def recognised_reasoning(template: str) -> ReasoningForm | None:
    """The family of a template, from its source."""
    return next((form for form in REASONING.values() if form.begin in template or form.end in template), None)
