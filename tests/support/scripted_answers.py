"""Answers that are given beforehand: a constraint lets only the tokens of a text follow."""

from contextlib import contextmanager
from dataclasses import replace


class Script:
    """A constraint of the engine that allows some tokens, and after them what another constraint allows."""

    def __init__(self, tokens, inner, vocab_size):
        self._tokens, self._inner, self._free = [*tokens], inner, b"\xff" * (-(-vocab_size // 8))
        self.mask = self._mask()

    def _mask(self):
        if self._tokens:
            mask = bytearray(len(self._free))
            mask[self._tokens[0] // 8] = 1 << self._tokens[0] % 8
            assert self._inner is None or self._inner.mask[self._tokens[0] // 8] >> self._tokens[0] % 8 & 1, self._tokens
            return bytes(mask)
        return self._free if self._inner is None else self._inner.mask

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
    submit, left, prompts, tokenizer = engine.submit, list(texts), [], engine.tokenizer

    def changed(prompt, params, **more):
        given, tokens = params.constraint, [*tokenizer.encode(left.pop(0), after=prompt), *[tokenizer.end_of_text] * ends]
        prompts.append(tokenizer.decode(prompt))
        return submit(prompt, replace(params, constraint=lambda: Script(tokens, given and given(), engine.vocab_size)), **more)

    engine.submit = changed
    try:
        yield prompts
        assert not left
    finally:
        del engine.submit
