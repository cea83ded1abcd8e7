"""Requests, events and results of callers, and the sequences of the scheduler. No tensors."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, overload

from ..errors import PenstockError
from .parameters import Constraint, SamplingParams

CHUNK = 64
"""Prompts are cut and cached only at multiples of this many tokens: ``CausalLM.advance`` processes a row in chunks of 64."""

FinishReason = Literal["stop", "length", "cancelled", "error"]


def aligned(position: int) -> int:
    """A position rounded down to a multiple of ``CHUNK``."""
    return position // CHUNK * CHUNK


class TokenLogprobs(NamedTuple):
    """The log probability of a token, and the most likely tokens at its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Logprobs(Items[TokenLogprobs]):
    """A list of ``TokenLogprobs`` that are created when read. Only their numbers are stored.

    As objects, those of long completions would occupy Python's garbage collector at every step.
    """

    def __init__(self) -> None:
        self._numbers, self._ends = array("d"), array("q", [0])

    def extend(self, more: Iterable[TokenLogprobs]) -> None:
        """Append some."""
        for one in more:
            self._numbers.extend(one[:2])
            for pair in one.top:
                self._numbers.extend(pair)
            self._ends.append(len(self._numbers))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        token, logprob, *top = self._numbers[self._ends[place] : self._ends[place + 1]]
        return TokenLogprobs(int(token), logprob, tuple(zip(map(int, top[::2]), top[1::2])))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Logprobs):
            return self._ends == other._ends and self._numbers == other._numbers
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class PromptLogprobs(Items["TokenLogprobs | None"]):
    """A list of ``TokenLogprobs`` of the tokens of a prompt, None for the first. Objects are created when read.

    rows : array of float
        A row of ``scoring.logprobs_of`` for each token but the first.
    likely : int
        The number of most likely tokens of a row.
    """

    def __init__(self, prompt: Items[int], rows: array[float], likely: int) -> None:
        self.prompt, self.rows, self.likely = prompt, rows, likely

    def __len__(self) -> int:
        return 1 + len(self.rows) // (1 + 2 * self.likely)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs | None]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs | None] | None:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        place, width = range(len(self))[index], 1 + 2 * self.likely
        if place == 0:
            return None
        logprob, *top = self.rows[(place - 1) * width : place * width]
        scores, names = top[: self.likely], map(int, top[self.likely :])
        return TokenLogprobs(self.prompt[place], logprob, tuple(zip(names, scores)))

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, PromptLogprobs) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(slots=True)
class Event:
    """The addition of one step to one completion of a request."""

    index: int
    """The index of the completion, below n."""
    tokens: tuple[int, ...] = ()
    text: str = ""
    """Text that no later token can change. Text may be empty if tokens are not, and vice versa."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set by the last event of the completion."""


@dataclass
class Completion:
    """One completion of a request."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """The tokens of the text, as sampled."""
    logprobs: Logprobs = field(default_factory=Logprobs)
    finish_reason: FinishReason | None = None
    """One of "stop" (a stop text, a stop token or the end of text), "length" (``max_tokens``), "cancelled" and "error"."""
    stopped_by: str | int | None = None
    """The stop text, or the token of ``stop_ids``, that ended it; None for other ends."""
    state: Any = None
    """The ``SequenceState`` after all of its tokens, with ``keep_state``."""

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.pieces)


@dataclass
class Result:
    """The result of a request."""

    prompt_tokens: list[int]
    completions: list[Completion]
    prompt_logprobs: PromptLogprobs | None = None
    """For each token of the prompt; None for the first."""
    cached_tokens: int = 0
    """Tokens of the prompt whose state came from the cache."""
    error: PenstockError | None = None
    """Why the request failed."""

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first completion."""
        return self.completions[0].tokens

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.completions[0].text


@dataclass(eq=False)
class Request:
    """One request on its way through the engine."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    """Requests of higher priority run first; see ``scheduler.PATIENCE``."""
    boundaries: tuple[int, ...] = ()
    """Positions in the prompt whose states are worth keeping, such as the ends of chat messages."""
    sink: Callable[[Request, Event], None] | None = None
    """Called for every event, by the thread that runs the steps."""
    state: Any = None
    """The ``SequenceState`` to continue from; ``prompt`` begins with its tokens."""
    cache_salt: str = ""
    """States of prefixes are shared only between requests with the same salt."""
    tuning: Any = None
    """The ``Tuning`` that the request names."""
    share: tuple[str, str] = ("", "")
    """The client, and one of its requests: see ``shares``."""
    sequences: list[Sequence] = field(default_factory=list)
    result: Result = field(init=False)
    done: bool = False
    began: float | None = None
    """The time of its first slot, by ``time.perf_counter``."""
    seed: int = field(init=False)
    constraints: list[Constraint | None] = field(init=False)
    """One for each completion."""

    def __post_init__(self) -> None:
        make = self.params.constraint
        self.constraints = [None if make is None else make() for _ in range(self.params.n)]
        self.result = Result(self.prompt, [Completion() for _ in range(self.params.n)])
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed

    @property
    def space(self) -> str:
        """States of prefixes are shared only between requests with the same space."""
        return self.cache_salt if self.tuning is None else f"{self.tuning.name}\0{self.cache_salt}"


@dataclass(eq=False)
class Sequence:
    """One completion as the scheduler sees it: counts of tokens, and where its state is.

    The state is in two rows of the pool. The aligned row has the first ``aligned`` tokens, a multiple of ``CHUNK``; the live row has the
    first ``computed`` tokens: chunks of the prompt, then what remains of it and generated tokens one by one. Canonical aligned states are
    of chunks of the prompt only, so they are functions of the tokens alone.
    """

    request: Request
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    """Tokens of the prompt, and generated tokens whose values are known."""
    pending: int = 0
    """Generated tokens whose values are not known yet: they were sampled by a step that still runs."""
    computed: int = 0
    aligned: int = 0
    cuts: set[int] = field(default_factory=set)
    """Multiples of ``CHUNK`` at which a piece of the prompt ends and the state is cached."""
    slot: int | None = None
    saved: Any = None
    """The state while the sequence is not in the pool. None: the state before the first token."""
    sample_only: bool = False
    """The logits of the last token, if known (after a fork or a cache hit): then nothing is computed before the first sample."""
    queued: bool = False
    """Whether it is in the queue."""
    waits: bool = False
    """Whether it waits for a slot: in the queue, or until it is forked."""
    share: Any = None
    """Its ``shares.Share``."""
    deadline: int = 0
    """The step of its arrival, minus ``PATIENCE`` for each level of priority."""
    due: int = 0
    """``deadline`` plus ``STRETCH`` times the steps that it needs alone."""
    order: int = 0
    finished: bool = False
    stops: Mapping[int, str] = field(default_factory=dict)
    """Stop texts that are special tokens, by token."""
    text: Any = None
    row: Any = None
    """Its ``slot_tables.Row``."""

    # of the request, read at every step
    prompt: int = field(init=False)
    """Tokens of the prompt."""
    most: int = field(init=False)
    """Tokens of the prompt and ``max_tokens``."""
    completion: Completion = field(init=False)
    constraint: Constraint | None = field(init=False)
    needs_values: bool = field(init=False)
    """Whether its next step may begin only when the values of all earlier tokens are on the host."""

    def __post_init__(self) -> None:
        request, params = self.request, self.request.params
        self.prompt = len(request.prompt)
        self.most = self.prompt + params.max_tokens
        self.completion, self.constraint = request.result.completions[self.index], request.constraints[self.index]
        self.needs_values = params.keep_state or self.constraint is not None

    @property
    def length(self) -> int:
        """Tokens of the prompt and generated ones, with the pending one."""
        return len(self.tokens) + self.pending


def shared_prefix(one: Items[int], other: Items[int]) -> int:
    """The number of tokens that two sequences begin with in common."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    low, high = 0, most  # one[:low] equals other[:low]; one[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
