"""From tokens to text: incremental decoding and stop strings, for one completion."""

from __future__ import annotations

from typing import Protocol


class Decoder(Protocol):
    """``penstock.models.tokenizers.Stream``."""

    def push(self, token: int) -> str:
        """The text that this token completes."""

    def finish(self) -> str:
        """The rest of the text."""


class TextStream:
    """Text of tokens up to the stop string that is complete first, which may begin and end inside of tokens.

    Text is held back as long as it may be the begin of a stop string.

    >>> class Letters:
    ...     def push(self, token): return chr(token)
    ...     def finish(self): return ""
    >>> stream = TextStream(Letters(), stop=("end",))
    >>> [stream.push(ord(letter)) for letter in "been end"], stream.stopped
    (['b', '', 'e', '', 'en ', '', '', ''], True)
    """

    def __init__(self, decoder: Decoder, stop: tuple[str, ...] = (), include_stop: bool = False) -> None:
        self._decoder, self._stop, self._include_stop = decoder, stop, include_stop
        self._firsts = {one[0] for one in stop}
        self._held = ""
        self.stopped = False
        """Whether a stop string was found. There is no more text then."""

    def push(self, token: int) -> str:
        """The text that no later token can change."""
        text = self._decoder.push(token)
        return self._released(text) if self._stop else text

    def finish(self) -> str:
        """The rest of the text."""
        if self.stopped:
            return ""
        text = self._released(self._decoder.finish())
        text, self._held = text + self._held, ""
        return text

    def _released(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        if not any(first in text for first in self._firsts):
            self._held = ""
            return text
        found = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stop if stop in text]
        if found:
            end, size = min(found)
            self.stopped, self._held = True, ""
            return text[:end] if self._include_stop else text[: end + size]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that is the begin of ``stop``."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[len(text) - size :])), 0)
