"""What an answer's text consists of: reasoning, content, and calls of tools. It is read in pieces as it comes.

A piece is given as soon as no later text can change it. So the pieces of a text, joined, do not depend on where it was cut.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from .families import CallForm, ReasoningForm

SPACE = " \t\r\n"
"""White space of JSON."""
HEADER = re.compile(r'S\{S"name"S:S"([a-zA-Z0-9_-]+)"S,S"(?:arguments|parameters)"S:S(?=\{)'.replace("S", f"[{SPACE}]*"))
"""The usual begin of a call, up to its arguments."""
FIELD = re.compile(r',S*(?:(")|$)'.replace("S", f"[{SPACE}]"))
"""The begin of a field after the arguments, perhaps without the quotation mark so far."""
OUTSIDE = frozenset(SPACE + string.ascii_letters + string.digits + '[]{}:,"+-.')
"""Characters of JSON outside of its strings."""


@dataclass(frozen=True)
class AnswerForm:
    """What the answers to one request may consist of."""

    strips: bool = False
    """White space before the content is left out."""
    reasoning: ReasoningForm | None = None
    thinking: bool = False
    """Whether the prompt ends inside of the reasoning. The answer may repeat its marker."""
    calls: CallForm | None = None
    names: frozenset[str] = frozenset()
    """Of functions. A call of another one is text."""
    parallel: bool = True
    """Whether several calls are taken; else those after the first are text."""
    opened: str = ""
    """The begin of the marker of reasoning, with which the prompt ends."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer. A call begins with its name; its arguments follow."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str


@dataclass
class Answer:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""
    cut: bool = False
    """Whether the text ends inside of the arguments of the last call."""

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        if piece.kind == "content":
            self.content += piece.text
        elif piece.kind == "reasoning":
            self.reasoning += piece.text
        elif piece.kind == "call":
            self.calls.append((piece.text, ""))
        else:
            name, arguments = self.calls[-1]
            self.calls[-1] = name, arguments + piece.text


def read_answer(form: AnswerForm, text: str) -> Answer:
    """The parts of a whole text.

    >>> from penstock.server.families import CALLS
    >>> form = AnswerForm(calls=CALLS["hermes"], names=frozenset({"f"}))
    >>> read_answer(form, '<tool_call>{"name": "f", "arguments": {}}</tool_call>').calls
    [('f', '{}')]
    """
    reader, answer = AnswerReader(form), Answer()
    for piece in [*reader.push(text), *reader.finish()]:
        answer.add(piece)
    answer.cut = reader.cut
    return answer


class AnswerReader:
    """Reads the text of one answer."""

    def __init__(self, form: AnswerForm) -> None:
        self._reasoning = ReasoningReader(form.reasoning, form.thinking, form.opened) if form.reasoning is not None else None
        self._calls = CallReader(form)

    def push(self, text: str) -> Iterator[Piece]:
        """The parts that a text adds."""
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text)
            if thought:
                yield Piece("reasoning", thought)
        yield from self._calls.push(text)

    @property
    def called(self) -> bool:
        """Whether a call has ended."""
        return self._calls.called

    @property
    def cut(self) -> bool:
        """Whether the text so far ends inside of the arguments of a call: the call is not to be run."""
        return self._calls.cut

    def finish(self) -> Iterator[Piece]:
        """What was held back."""
        if self._reasoning is not None:
            thought, text = self._reasoning.finish()
            if thought:
                yield Piece("reasoning", thought)
            yield from self._calls.push(text)
        yield from self._calls.finish()


def unfinished(text: str, marker: str) -> int:
    """The length of the longest end of a text that a marker begins with.

    >>> unfinished("a <th", "<think>")
    3
    """
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:size])), 0)


class ReasoningReader:
    """Divides a text into reasoning, which is at its begin if there is any, and the rest. White space around reasoning is left out."""

    def __init__(self, form: ReasoningForm, thinking: bool, opened: str = "") -> None:
        self._form, self._thinking, self._opened = form, thinking, opened
        self.stage: Literal["begin", "inside", "after", "over"] = "begin"
        self._held = opened
        self._words = False
        """Whether any reasoning was given."""

    @property
    def inside(self) -> bool:
        """Whether the text so far ends inside of the reasoning."""
        return self.stage == "inside" or (self.stage == "begin" and self._thinking)

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning, and the text after it."""
        if self.stage == "over":
            return "", text
        self._held += text
        thought = ""
        if self.stage == "begin":
            bare = self._held.lstrip()
            if bare.startswith(self._form.begin):  # some models repeat the one with which the prompt ends
                self.stage, self._held = "inside", bare[len(self._form.begin) :]
            elif not self._form.begin.startswith(bare):
                self.stage, self._held = ("inside", bare) if self._thinking else ("over", self._held[len(self._opened) :])
        if self.stage == "inside":
            thought = self._thought()
        if self.stage == "after":
            self._held = self._held.lstrip()
            self.stage = "over" if self._held else "after"
        if self.stage != "over":
            return thought, ""
        rest, self._held = self._held, ""
        return thought, rest

    def _thought(self) -> str:
        found, end, rest = self._held.partition(self._form.end)
        if end:
            self.stage, keep = "after", rest
        else:
            found = found[: len(found) - unfinished(found, self._form.end)]
            keep = self._held[len(found.rstrip()) :]
        found = found.rstrip()
        if not self._words:
            found = found.lstrip()
        self._words = self._words or found != ""
        self._held = keep
        return found

    def finish(self) -> tuple[str, str]:
        """What was held back: a marker that did not become whole."""
        held, self._held = self._held, ""
        if self.inside:
            return held.rstrip() if self._words else held.strip(), ""
        return "", held[len(self._opened) :] if self.stage == "begin" else ""


class JsonObject:
    """Finds the end of a JSON object, piece by piece. It sees strings and brackets only."""

    def __init__(self, depth: int = 0) -> None:
        """``depth``: 1 inside the object."""
        self._depth, self._string, self._escaped = depth, False, False

    def scan(self, text: str) -> tuple[int, bool] | None:
        """Where the object ends in a text, and whether it is closed there. None: later."""
        for at, character in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._string = False
            elif character not in OUTSIDE or (self._depth == 0 and character != "{" and character not in SPACE):
                return at, False
            elif character == '"':
                self._string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1, True
        return None


class CallReader:
    """Divides a text into content and calls.

    A call is one from the begin of its arguments on, if it has the usual form: marker, name of a known function, arguments. Its arguments
    are given as they come, and may be cut or wrong. One in another order is given when it is whole. Anything else is content.
    White space before and after calls is left out, and so are fields after the arguments.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form, self._calls = form, form.calls
        self._stage: Literal["content", "first", "header", "arguments", "end", "fields"] = "content"
        if form.calls is not None and not form.calls.begin:
            self._stage = "first"
        self._held = ""
        self._space = ""
        """White space at the end of the content so far."""
        self._bare = form.strips
        """Whether white space is left out until there is content."""
        self._count = 0
        self._scanned = 0
        self._object = JsonObject()
        self._marker = ""
        """Text before the header."""
        self._ends: list[str] = []

    def push(self, text: str) -> Iterator[Piece]:
        """The parts that a text adds."""
        self._held += text
        stages = {
            "content": self._content, "first": self._first, "header": self._header, "arguments": self._arguments, "end": self._end,
            "fields": self._fields,
        }  # fmt: skip
        while self._held:
            before = self._stage, len(self._held)
            yield from stages[self._stage]()
            if before == (self._stage, len(self._held)):
                break

    @property
    def called(self) -> bool:
        """Whether a call has ended."""
        return self._count > 0 and self._stage == "content"

    @property
    def cut(self) -> bool:
        """Whether the text so far ends inside of the arguments of a call."""
        return self._stage == "arguments"

    def finish(self) -> Iterator[Piece]:
        """What was held back. A call without its begin is content."""
        if self._stage == "header":
            yield from self._undo(len(self._held))
        elif self._stage in ("content", "first"):
            yield from self._text(self._held)
        self._held = ""
        if self._space and not self._bare:
            yield Piece("content", self._space)

    def _text(self, text: str) -> Iterator[Piece]:
        if self._bare:
            text = text.lstrip()
        if not text:
            return
        self._bare = False
        if self._calls is None:
            yield Piece("content", text)
            return
        text = self._space + text
        given = text.rstrip()
        self._space = text[len(given) :]
        if given:
            yield Piece("content", given)

    def _content(self) -> Iterator[Piece]:
        """Text up to the next marker."""
        form = self._calls
        if form is None or not form.begin or (self._count and not self._form.parallel):
            text, self._held = self._held, ""
            yield from self._text(text)
            return
        text, marker, rest = self._held.partition(form.begin)
        if marker:
            yield from self._text(text)
            self._begin(marker, rest)
        else:
            keep = len(text) - unfinished(text, form.begin)
            self._held = text[keep:]
            yield from self._text(text[:keep])

    def _first(self) -> Iterator[Piece]:
        """The begin of an answer that may be a call, without a marker."""
        assert self._calls is not None
        bare = self._held.lstrip()
        ignored = self._calls.ignored
        if bare.startswith("{"):
            self._begin("", self._held)
        elif ignored and bare.startswith(ignored):
            marker, found, rest = self._held.partition(ignored)
            self._begin(marker + found, rest)
        elif bare and not ignored.startswith(bare):
            self._stage = "content"
        yield from ()

    def _begin(self, marker: str, rest: str) -> None:
        self._stage, self._marker, self._held = "header", marker, rest
        self._object, self._scanned = JsonObject(), 0

    def _header(self) -> Iterator[Piece]:
        found = HEADER.match(self._held)
        if found is not None:
            if found[1] in self._form.names:
                self._stage, self._held, self._object = "arguments", self._held[found.end() :], JsonObject()
                yield self._call(found[1])
            else:
                yield from self._undo(found.end())
            return
        ended = self._object.scan(self._held[self._scanned :])
        if ended is None:
            self._scanned = len(self._held)
            return
        end, closed = self._scanned + ended[0], ended[1]
        whole = self._whole(self._held[:end]) if closed else None
        if whole is None:
            yield from self._undo(end)
            return
        self._held, self._stage = self._held[end:], "end"
        yield self._call(whole[0])
        yield Piece("arguments", whole[1])
        self._ends.remove("}")

    def _whole(self, text: str) -> tuple[str, str] | None:
        """A call in any order of its fields."""
        try:
            found: Any = json.loads(text)
        except (ValueError, RecursionError):
            return None
        arguments = found.get("arguments", found.get("parameters", {}))
        name = found.get("name")
        if not isinstance(name, str) or name not in self._form.names or not isinstance(arguments, dict):
            return None
        return name, json.dumps(arguments, ensure_ascii=False)

    def _call(self, name: str) -> Piece:
        assert self._calls is not None
        self._count += 1
        self._space, self._bare = "", True
        self._ends = ["}", self._calls.end] if self._calls.end else ["}"]
        return Piece("call", name)

    def _undo(self, end: int) -> Iterator[Piece]:
        """The begin of what is no call is content."""
        text, self._held, self._stage = self._marker + self._held[:end], self._held[end:], "content"
        yield from self._text(text)

    def _arguments(self) -> Iterator[Piece]:
        ended = self._object.scan(self._held)
        end = len(self._held) if ended is None else ended[0]
        if ended is not None:
            self._stage = "end"
        text, self._held = self._held[:end], self._held[end:]
        if text:
            yield Piece("arguments", text)

    def _end(self) -> Iterator[Piece]:
        """What closes a call. Some of it may be absent."""
        while self._ends:
            self._held = self._held.lstrip()
            if self._held.startswith(self._ends[0]):
                self._held = self._held[len(self._ends.pop(0)) :]
            elif self._ends[0] == "}" and (found := FIELD.match(self._held)) is not None:
                if found[1]:
                    self._stage, self._object = "fields", JsonObject(1)
                return
            elif self._ends[0].startswith(self._held):
                return
            else:
                self._ends.pop(0)
        self._stage = "content"
        yield from ()

    def _fields(self) -> Iterator[Piece]:
        """Fields of a call after its arguments."""
        ended = self._object.scan(self._held)
        self._held = "" if ended is None else self._held[ended[0] :]
        if ended is not None:
            self._ends.remove("}")
            self._stage = "end"
        yield from ()
