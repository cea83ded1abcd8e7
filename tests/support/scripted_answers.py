"""Answers that are given beforehand: a constraint lets only the tokens of a text follow."""

from contextlib import contextmanager
from dataclasses import replace

from live_server import VOCAB

END = VOCAB - 1


class Script:
    """A constraint of the engine that allows one text, and after it the end, or what another constraint allows."""

    def __init__(self, text, inner, ends):
        self._tokens, self._inner, self._ends = [*text.encode(), *[END] * ends], inner, ends
        self.mask = self._mask()

    def _mask(self):
        if self._tokens:
            mask = bytearray((VOCAB + 7) // 8)
            mask[self._tokens[0] // 8] = 1 << self._tokens[0] % 8
            assert self._inner is None or self._inner.mask[self._tokens[0] // 8] >> self._tokens[0] % 8 & 1, bytes(self._tokens)
            return bytes(mask)
        return b"\xff" * VOCAB if self._inner is None else self._inner.mask

    def accept(self, token):
        if self._tokens:
            assert self._tokens.pop(0) == token
        ended = self._inner is not None and self._inner.accept(token)
        if not ended:
            self.mask = self._mask()
        return ended


@contextmanager
def scripted(engine, *texts, ends=True):
    """The next completions of an engine are these texts, within what their requests allow. Yields the prompts, as they come."""
    submit, left, prompts = engine.submit, list(texts), []

    def changed(prompt, params, **more):
        given, text = params.constraint, left.pop(0)
        prompts.append(engine.tokenizer.decode(prompt))
        return submit(prompt, replace(params, constraint=lambda: Script(text, given and given(), ends)), **more)

    engine.submit = changed
    try:
        yield prompts
        assert not left
    finally:
        del engine.submit
