"""The table of sampling parameters, which requests, the sampler, the server and the documentation share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple, Protocol, TypeGuard, get_type_hints

from ..errors import Complaints, DtypeError, RangeError, described
from ..layers.sizes import check_number, check_whole

LEAST_FLOAT, MOST_FLOAT = 2.0**-126, 2.0**128 - 2.0**104
"""The largest float32: logits are changed in float32."""


class Range(NamedTuple):
    """The values of a parameter."""

    least: float
    most: float = math.inf
    above: bool = False
    """Whether ``least`` is left out."""
    http: tuple[float, float] | None = None
    """The narrower range of the server. None: the same."""
    reads: str = "sampler"
    """The module of the engine that reads it."""


class Constraint(Protocol):
    """The tokens that may follow in one completion, for example by a grammar."""

    @property
    def mask(self) -> bytes:
        """The mask of the next token: bit t % 8 of byte t // 8 is 1 if token t may follow. At least one bit is 1."""

    def accept(self, token: int) -> bool:
        """Take a token and set the next mask. Returns whether the completion ends here. If it raises, the request fails."""


class Prelude(Protocol):
    """Finds the begin of a completion's text in which fewer stop texts count, such as reasoning."""

    def push(self, text: str) -> tuple[str, str]:
        """Take a text. Returns more of the begin, and what comes after it. What may be either is held back."""

    def finish(self) -> tuple[str, str]:
        """What was held back."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when a sequence ends. Raises DtypeError or RangeError.

    In this order: logit_bias, repetition penalty, presence and frequency penalties, temperature, min_p, top_k, top_p.
    """

    max_tokens: Annotated[int, Range(0, reads="steps")] = 16
    """At most this many new tokens; 0 with ``prompt_logprobs`` only scores the prompt."""
    min_tokens: Annotated[int, Range(0, reads="minimum")] = 0
    """The least number of new tokens before the one that ends a completion by the end of text, a stop token or a stop text. At most
    ``max_tokens``. A constraint that allows nothing else may end it earlier."""
    temperature: Annotated[float, Range(0, http=(0, 2))] = 1.0
    """The divisor of the logits; 0 takes the most likely token."""
    top_k: Annotated[int, Range(0)] = 0
    """Keep the k most likely tokens; 0 keeps all. Among equal logits, lower tokens come first."""
    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to at least this."""
    min_p: Annotated[float, Range(0, 1)] = 0.0
    """Keep tokens with at least this share of the probability of the most likely one."""
    presence_penalty: Annotated[float, Range(-MOST_FLOAT, MOST_FLOAT, http=(-2, 2))] = 0.0
    """Subtracted from the logits of tokens that were generated at least once."""
    frequency_penalty: Annotated[float, Range(-MOST_FLOAT, MOST_FLOAT, http=(-2, 2))] = 0.0
    """Subtracted from the logit of a token once for each time it was generated."""
    repetition_penalty: Annotated[float, Range(LEAST_FLOAT, MOST_FLOAT, http=(0.01, 100))] = 1.0
    """Positive logits of tokens of the prompt and of generated tokens are divided by this, negative ones multiplied."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens, which must be below the vocabulary's size; -inf excludes one."""
    seed: Annotated[int | None, Range(-(2**63), 2**64 - 1, http=(-(2**63), 2**63 - 1))] = None
    """Equal seeds give equal tokens, whatever the other requests are. None: a random seed."""
    stop: tuple[str, ...] = ()
    """End before the first of these texts that is complete (after it with ``include_stop``). Needs a tokenizer. One that is the name of a
    special token of it, such as <|im_end|>, ends at this token, which has no text."""
    late_stop: tuple[str, ...] = ()
    """Likewise, but only in the text after the begin that ``prelude`` finds. Special tokens end it anywhere."""
    prelude: Callable[[], Prelude] | None = None
    """Returns what finds this begin of each completion."""
    stop_ids: tuple[int, ...] = ()
    """End at one of these tokens, which must be below the vocabulary's size. The result's tokens include it, its text does not."""
    include_stop: bool = False
    ignore_end: bool = False
    """Continue after the tokenizer's end of text."""
    n: Annotated[int, Range(1, reads="engine")] = 1
    """The number of completions, which share one prefill. The seed of completion i is derived from ``seed`` and i."""
    logprobs: Annotated[int | None, Range(0, 20, reads="scoring")] = None
    """Return log probabilities of generated tokens, and of this many most likely tokens, from the unmodified logits of the model."""
    prompt_logprobs: Annotated[int | None, Range(0, 20, reads="scoring")] = None
    """Likewise for the tokens of the prompt, each given those before it. The prompt is then never taken from the cache."""
    constraint: Callable[[], Constraint] | None = None
    """Returns the constraint of each completion."""
    keep_state: bool = False
    """Return the state after each completion, to continue from it."""
    echo: bool = False
    """Put the prompt's text before the completions' texts."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "late_stop", "stop_ids"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # a copy: the caller may change its own
        complaints = Complaints("SamplingParams")
        for name, (one, kind) in PARAMETERS.items():
            value = getattr(self, name)
            if kind is not float:
                if value is not None or kind is int:
                    check_whole(complaints, name, value, int(one.least), None if one.most == math.inf else int(one.most))
            elif one.above and _is_number(value) and value == one.least:
                complaints.add(RangeError, name, f"above {one.least:g} and at most {one.most:g}", value)
            else:
                check_number(complaints, name, value, one.least, one.most)
        if type(self.min_tokens) is type(self.max_tokens) is int and 0 <= self.max_tokens < self.min_tokens:
            complaints.add(RangeError, "min_tokens", f"at most max_tokens = {self.max_tokens}", self.min_tokens)
        _check_items(complaints, "stop", self.stop, str, "non-empty texts")
        _check_items(complaints, "late_stop", self.late_stop, str, "non-empty texts")
        if self.late_stop and self.prelude is None:
            complaints.add(RangeError, "late_stop", "empty without a prelude", described(self.late_stop), "Pass the texts as stop.")
        _check_items(complaints, "stop_ids", self.stop_ids, int, "tokens")
        if isinstance(self.stop_ids, tuple) and (negative := [one for one in self.stop_ids if isinstance(one, int) and one < 0]):
            complaints.add(RangeError, "stop_ids", "tokens of at least 0", negative[0])
        if not isinstance(self.logit_bias, Mapping) or not all(
            type(token) is int and token >= 0 and _is_number(bias) and (bias == -math.inf or abs(bias) <= MOST_FLOAT)
            for token, bias in self.logit_bias.items()
        ):
            complaints.add(DtypeError, "logit_bias", "a mapping of tokens to numbers of float32 below inf", described(self.logit_bias))
        for name in ("include_stop", "ignore_end", "keep_state", "echo"):
            if not isinstance(getattr(self, name), bool):
                complaints.add(DtypeError, name, "True or False", described(getattr(self, name)))
        for name in ("prelude", "constraint"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                complaints.add(DtypeError, name, "a callable or None", described(getattr(self, name)))
        complaints.raise_any()

    @cached_property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0 or self.top_k == 1

    @cached_property
    def penalised(self) -> bool:
        """Whether logits depend on earlier tokens."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _declared() -> dict[str, tuple[Range, Any]]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    return {name: (hint.__metadata__[0], hint.__origin__) for name, hint in hints.items() if hasattr(hint, "__metadata__")}


PARAMETERS = _declared()
"""Ranges of numbers by name, with their types: int, float, or int | None."""


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_items(complaints: Complaints, name: str, value: object, kind: type, rule: str) -> None:
    if not isinstance(value, tuple) or not all(isinstance(one, kind) and not isinstance(one, bool) and one != "" for one in value):
        complaints.add(DtypeError, name, f"a tuple of {rule}", described(value))
