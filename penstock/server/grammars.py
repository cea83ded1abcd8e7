"""Completions that follow a JSON schema: masks of llguidance for the engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from ..errors import Complaints, MissingExtra, RangeError
from ..models.tokenizer_json import HuggingFace
from ..models.tokenizers import Tokenizer, ends_of
from .errors import Refused
from .limits import Limits
from .protocol import ResponseFormat

BEFORE = "."
"""Any text: what llguidance asks for is in the middle of one."""
OPTIONS: Any = {"whitespace_flexible": False}
"""Of llguidance, for schemas without an ``x-guidance`` that says otherwise. By its own, white space may go on for ever."""


def wanted_schema(form: ResponseFormat | None) -> dict[str, Any] | None:
    """The schema that a completion must follow; None for any text."""
    if form is None or form.type == "text":
        return None
    return {"type": "object"} if form.json_schema is None else form.json_schema.schema_


class GrammarConstraint:
    """The state of one completion: a ``Constraint`` of the engine.

    param : str
        The field of the request that the grammar is of.
    end : int, optional
        The token that llguidance knows as the end of an answer...
    others : collection of int
        ...and those that end one as well. They may follow wherever it may.
    """

    def __init__(self, matcher: Any, param: str, end: int | None = None, others: Collection[int] = ()) -> None:
        self._matcher, self._param, self._end, self._others = matcher, param, end, others
        self.mask = self._mask()

    def accept(self, token: int) -> bool:
        """Take a token; whether nothing can follow."""
        self._matcher.consume_token(self._end if token in self._others else token)
        self._check()
        if self._matcher.is_stopped():
            return True
        self.mask = self._mask()
        return False

    def _mask(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        if not self._others or self._end is None or not mask[self._end // 8] >> self._end % 8 & 1:
            return mask
        wider = bytearray(mask)
        for token in self._others:
            wider[token // 8] |= 1 << token % 8
        return bytes(wider)

    def _check(self) -> None:
        if self._matcher.is_error():
            complaints = Complaints("completions")
            got = self._matcher.get_error().partition("\n<state>")[0]  # a dump of its parser follows
            complaints.add(RangeError, self._param, "within the limits of llguidance", got)
            complaints.raise_any()


class Grammars:
    """Compiles grammars for a tokenizer. The first use also builds llguidance's trie of tokens: a fraction of a second for 65,536."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: Limits | None = None) -> None:
        self._tokenizer, self._vocab_size, self._limits = tokenizer, vocab_size, limits or Limits()
        self._made: Any = None
        self._lock = threading.Lock()

    @property
    def ends(self) -> bool:
        """Whether a token ends a text. Without one, a text ends where its grammar allows nothing more."""
        return self._tokenizer.end_of_text is not None

    def compile(self, schema: dict[str, Any], function: str, param: str = "response_format") -> Callable[[], GrammarConstraint]:
        """What makes the constraint of each completion. Raises Refused for a schema that llguidance does not know, or MissingExtra.

        param : str
            The field of the request that the schema is of.
        """
        _check(schema, function, param, self._limits)
        text, most = json.dumps(schema), self._limits.schema_bytes
        if len(text) > most:
            raise Refused(400, f"{function}: the bytes of the schema must be at most {most}, got {len(text)}.", param=param)
        return self._compile("json_schema", text, function, param)

    def compile_lark(self, source: str, function: str, param: str) -> Callable[[], GrammarConstraint]:
        """Likewise for a grammar in llguidance's form of Lark's syntax. ``compile`` takes its JSON schemas."""
        return self._compile("lark", source, function, param)

    def _compile(self, kind: Literal["json_schema", "lark"], source: str, function: str, param: str) -> Callable[[], GrammarConstraint]:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise MissingExtra.of("serve", "llguidance", "serve") from error
        with self._lock:
            self._made = self._made or _for_llguidance(self._tokenizer, self._vocab_size)
        try:
            if kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(source, defaults=OPTIONS)
            else:
                grammar = LLMatcher.grammar_from_lark(source)
            first = LLMatcher(self._made, grammar)
            wrong = first.get_error().partition("\n<state>")[0]
        except ValueError as error:
            wrong = str(error)
        if wrong:
            message = f"{function}: {param} must be a JSON schema that llguidance knows, got one with: {wrong}."
            raise Refused(400, message, param=param)
        end = self._tokenizer.end_of_text
        others = ends_of(self._tokenizer) - {end}
        return lambda: GrammarConstraint(first.deep_copy(), param, end, others)


def _check(schema: dict[str, Any], function: str, param: str, limits: Limits) -> None:
    """Raise Refused for what llguidance rounds, or takes minutes or gigabytes for."""
    patterns, level, parts = 0, 0, [schema]
    while parts:
        level += 1
        below: list[Any] = []
        for part in parts:
            if isinstance(part, int | float) and abs(part) > (2**53 if isinstance(part, int) else 2**63 - 1024):
                rule = "integers of a schema must be from -2^53 to 2^53, and other numbers from -2^63 to 2^63"
                raise Refused(400, f"{function}: {rule}, got {part}. llguidance would round it.", param=param)
            if isinstance(part, dict):
                below += part.values()
                named = part.get("patternProperties")
                patterns += len(named) if isinstance(named, dict) else 0
            elif isinstance(part, list):
                below += part
        parts = below
    for name, count, most in (("levels", level, limits.schema_levels), ("patternProperties", patterns, limits.schema_patterns)):
        if count > most:
            raise Refused(400, f"{function}: the {name} of a schema must be at most {most}, got {count}.", param=param)


class Vocabulary:
    """A tokenizer as llguidance wants it. Tokens without bytes are special.

    values : list of bytes
        The bytes of each token in the middle of a text.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, values: Sequence[bytes]) -> None:
        self._tokenizer, self._values = tokenizer, values
        self._before = tokenizer.encode(BEFORE)
        self._tokens = {value: token for token, value in enumerate(values) if value}
        self._longest = max(map(len, self._tokens), default=0)
        found, end = [*values], tokenizer.end_of_text
        if end is None:  # llguidance needs one; no model has logits for it
            end = len(found)
            found.append(b"")
        self.eos_token_id = end
        self.special_token_ids = [token for token, one in enumerate(found) if not one]
        self.tokens = [one or f"<|special {token}|>".encode() for token, one in enumerate(found)]

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text in the middle of another one."""
        wanted = text.encode() if isinstance(text, str) else text
        found = self._tokenizer.encode(wanted.decode(errors="replace"), after=self._before)
        return found if b"".join(map(self._values.__getitem__, found)) == wanted else self._greedy(wanted)

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token at each place, as far as there are any."""
        found, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((size for size in sizes if text[at : at + size] in self._tokens), 0)
            if not size:
                break
            found.append(self._tokens[text[at : at + size]])
            at += size
        return found


def _values(tokenizer: Tokenizer, vocab_size: int) -> list[bytes] | None:
    """The bytes of each token of a model in the middle of a text, none for those that end an answer; None if they are not known."""
    found = tokenizer.token_bytes
    if isinstance(tokenizer, HuggingFace):
        pieces = tokenizer.pieces
        if pieces is None:
            return None
        found = [*pieces, *[b""] * (vocab_size - len(pieces))]
    ends = ends_of(tokenizer)  # some files have them as text
    return [b"" if one is None or token in ends else bytes(one) for token, one in enumerate(found)]


def _for_llguidance(tokenizer: Tokenizer, vocab_size: int) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    values = _values(tokenizer, vocab_size)
    if values is None:
        assert isinstance(tokenizer, HuggingFace)
        return LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=tokenizer.end_of_text)
    return LLTokenizer(TokenizerWrapper(Vocabulary(tokenizer, values)))
