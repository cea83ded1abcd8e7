"""From tokens to text: incremental decoding and stop strings, for one completion."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Protocol

from .parameters import Prelude, SamplingParams


class Decoder(Protocol):
    """``penstock.models.tokenizers.Stream``."""

    def push(self, token: int) -> str:
        """Take a token and return the text that it completes."""

    def finish(self) -> str:
        """The rest of the text."""


class StopStrings:
    """An automaton that searches for several texts at once, one character at a time (Aho and Corasick 1975).

    A node is the longest suffix of the input that is a prefix of one of the texts. Node 0 is the empty one.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]
        """For each node, the node of the next shorter suffix."""
        self.depth = [0]
        """The length of each node in characters."""
        self.found = [0]
        """The length of the longest text that ends at a node, or 0."""
        for text in stop:
            node = 0
            for character in text:
                if character not in self._children[node]:
                    self._children[node][character] = len(self.depth)
                    self._children.append({})
                    self._fallback.append(0)
                    self.depth.append(self.depth[node] + 1)
                    self.found.append(0)
                node = self._children[node][character]
            self.found[node] = len(text)
        queue = list(self._children[0].values())
        for node in queue:  # shorter ones first
            for character, child in self._children[node].items():
                self._fallback[child] = self.next(self._fallback[node], character)
                self.found[child] = self.found[child] or self.found[self._fallback[child]]
                queue.append(child)
        self.first = re.compile(f"[{''.join(map(re.escape, self._children[0]))}]").search
        """Finds the first character of any of the texts."""

    def next(self, node: int, character: str) -> int:
        """The node after one more character."""
        while node and character not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(character, 0)


stop_strings = lru_cache(64)(StopStrings)
"""Cached, because many requests have the same stop strings."""


class TextStream:
    """Text of tokens up to the first complete stop string, which may begin and end inside tokens.

    Text is held back while it may be the beginning of a stop string. The time per character does not depend on the strings.
    Strings that are complete within the first ``least`` tokens do not stop the text.

    >>> class Letters:
    ...     def push(self, token): return chr(token)
    ...     def finish(self): return ""
    >>> stream = TextStream(Letters(), stop=("end",))
    >>> [stream.push(ord(letter)) for letter in "been end"], stream.stopped
    (['b', '', 'e', '', 'en ', '', '', ''], True)
    """

    def __init__(self, decoder: Decoder, stop: tuple[str, ...] = (), include_stop: bool = False, least: int = 0) -> None:
        self._decoder, self._decode, self._include_stop = decoder, decoder.push, include_stop
        self._stop = stop_strings(stop) if stop else None
        self._node = 0
        self.held = ""
        """What may be the beginning of a stop string."""
        self.least = least
        """The number of further tokens that cannot stop the text."""
        self.stopped_by: str | None = None
        """The stop string that was found. No more text follows."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stopped_by is not None

    def push(self, token: int) -> str:
        """The text that no later token can change."""
        text = self._decode(token)
        if self._stop is None:
            return text
        text = self._released(text, self._stop)
        self.least -= 1
        return text

    def take(self, text: str) -> str:
        """The same for a text that is known before the next token."""
        return text if self._stop is None else self._released(text, self._stop)

    def finish(self) -> str:
        """The rest of the text."""
        if self.stopped_by is not None:
            return ""
        text = self._decoder.finish()
        if self._stop is not None:
            text = self._released(text, self._stop)
        text, self.held = text + self.held, ""
        return text

    def _released(self, text: str, stop: StopStrings) -> str:
        if self.stopped_by is not None:
            return ""
        node, begin = self._node, 0
        if node == 0:
            first = stop.first(text)
            if first is None:
                return text
            begin = first.start()
        held, text = len(self.held), self.held + text
        for at in range(held + begin, len(text)):
            node = stop.next(node, text[at])
            if stop.found[node] and self.least <= 0:
                begin = at + 1 - stop.found[node]
                self.stopped_by, self.held = text[begin : at + 1], ""
                return text[: at + 1] if self._include_stop else text[:begin]
        self._node, keep = node, len(text) - stop.depth[node]
        self.held = text[keep:]
        return text[:keep]


class LateTextStream:
    """A ``TextStream`` that also ends at other stop strings, which begin after the text's prelude."""

    def __init__(
        self, decoder: Decoder, prelude: Prelude, stop: tuple[str, ...], late: tuple[str, ...], include_stop: bool = False, least: int = 0
    ) -> None:
        self._decoder, self._prelude, self._late, self._include_stop, self._least = decoder, prelude, late, include_stop, least
        self._stop = stop
        self._first = TextStream(decoder, stop, least=least)
        self._rest: TextStream | None = None
        """What finds all of them, after the prelude."""
        self._given = 0
        """Characters that were passed to the prelude."""
        self._early = 0
        """Characters of the first ``least`` tokens."""
        self._begin = 0
        """Where the text after the prelude begins."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found. No more text follows."""
        return self._first.stopped_by if self._rest is None else self._rest.stopped_by

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stopped_by is not None

    def push(self, token: int) -> str:
        """The text that no later token can change."""
        if self._rest is not None:
            return self._rest.push(token)
        given = self._first.push(token)
        if self._least > 0:
            self._early = self._given + len(given) + len(self._first.held)
        text = self._taken(given)
        self._least -= 1
        if self._rest is not None:
            self._rest.least -= 1
        return text

    def finish(self) -> str:
        """The rest of the text."""
        if self.stopped:
            return ""
        text = "" if self._rest is not None else self._taken(self._first.finish())
        if self._rest is None and not self.stopped:
            before, after = self._prelude.finish()
            self._begin += len(before)
            text += before + self._after(after)
        return text if self._rest is None else text + self._rest.finish()

    def _taken(self, text: str) -> str:
        """The part of a text that no later token can change."""
        before, after = self._prelude.push(text)
        self._given, self._begin = self._given + len(text), self._begin + len(before)
        if self._first.stopped_by is not None:
            return self._stopped(before, after, self._first.stopped_by)
        return before + self._after(after + self._first.held) if after else before

    def _stopped(self, before: str, after: str, stop: str) -> str:
        """The last text, for what precedes a stop string in the prelude and after it. Another one may be complete earlier."""
        for more in self._prelude.push(stop), self._prelude.finish():
            before, after = before + more[0], after + more[1]
            self._begin += len(more[0])
        begins = len(after) < len(stop)  # in the prelude: of strings that are complete at the same place, it is the longest
        found = self._after(after[:-1] if begins else after)
        if self.stopped:
            return before + found
        self._rest = None
        return before + after if self._include_stop else (before + after)[: -len(stop)]

    def _after(self, text: str) -> str:
        """Begin to search for all stop strings, in a text after the prelude. Its begin may be of the first ``least`` tokens."""
        early = max(self._early - self._begin, 0)
        self._rest = TextStream(self._decoder, (*self._stop, *self._late), self._include_stop, least=1)
        found = self._rest.take(text[:early])
        self._rest.least = self._least
        return found + self._rest.take(text[early:])


def text_stream(decoder: Decoder, params: SamplingParams) -> TextStream | LateTextStream:
    """What makes the text of a completion."""
    if params.prelude is None or not params.late_stop:
        return TextStream(decoder, params.stop, params.include_stop, params.min_tokens)
    return LateTextStream(decoder, params.prelude(), params.stop, params.late_stop, params.include_stop, params.min_tokens)
