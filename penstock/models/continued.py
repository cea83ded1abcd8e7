"""Tokens of a text that continues another one, where a ``tokenizer.json`` changes the begin of a text."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

SPACE = re.compile(r"\A[^\S\x1c-\x1f]+")
"""White space at the begin of a text, as the package tokenizers has it: four control characters that Python counts are none."""


class Continued:
    """Encodes what follows a token as the end of one whole text.

    Files add a space by a normalizer or a pre-tokenizer, some also after each added token, such as ``</s>``. So the text up to its first
    added token is encoded by the same parts without a space, and by the file's own model. What follows is as in any text.

    rust : tokenizers.Tokenizer
    """

    def __init__(self, rust: Any) -> None:
        from tokenizers import Tokenizer, models

        self._rust = rust
        self._added = rust.get_added_tokens_decoder()
        self._parts = {normalized: _parts(rust, normalized) for normalized in (None, True, False)}
        """Parts after a text (None), and after an added token that is found in the normalized text or not. None: those of the file."""
        self._finder = Tokenizer(models.BPE())
        """It has the added tokens only: any other text may have the same tokens, as unknown characters do."""
        if rust.normalizer is not None:
            self._finder.normalizer = rust.normalizer
        self._finder.add_tokens([*self._added.values()])

    def encode(self, text: str, last: int) -> list[int]:
        """Tokens of a text after the token ``last``."""
        before = self._added.get(last)
        if before is not None and before.rstrip:  # it includes white space after it
            text = SPACE.sub("", text)
        parts = self._parts[None if before is None else before.normalized]
        if parts is None:
            return list(self._rust.encode(text, add_special_tokens=False).ids)
        added = self._finder.encode(text, add_special_tokens=False).offsets
        if not added:
            return self._model_tokens(text, parts)
        found = self._rust.encode(text, add_special_tokens=False)
        begin, ids = added[0][0], list(found.ids)
        n = next(n for n, token in enumerate(ids) if token in self._added and found.offsets[n][0] >= begin)
        return [*self._model_tokens(text[:begin], parts), *ids[n:]]

    def _model_tokens(self, text: str, parts: _Parts) -> list[int]:
        """Tokens of a text without added ones."""
        model = self._rust.model
        text = text if parts.normalizer is None else parts.normalizer.normalize_str(text)
        return [token.id for piece in parts.pieces(text) for token in model.tokenize(piece)]


class _Parts(NamedTuple):
    """Parts of a tokenizer without what changes the begin of a text. None: there is no such part."""

    normalizer: Any
    own: Any
    """The pre-tokenizer of the file."""
    splits: Any
    """What it does before it adds a space, perhaps to each piece."""
    rest: Any
    """What it does then, without a space."""

    def pieces(self, text: str) -> list[str]:
        """Texts to pass to the model."""
        if not text:
            return []
        if self.splits is None:
            return [text] if self.rest is None else [piece for piece, _ in self.rest.pre_tokenize_str(text)]
        found, own = self.splits.pre_tokenize_str(text), self.own.pre_tokenize_str(text)
        if not found or found[0][1][0]:  # white space was left out before the first piece: its space is one of the text
            return [piece for piece, _ in own]
        first, (_, end) = found[0]
        return [*(piece for piece, _ in self.rest.pre_tokenize_str(first)), *(piece for piece, (begin, _) in own if begin >= end)]


def _parts(rust: Any, normalized: bool | None) -> _Parts | None:
    """Parts for what follows a text (None), or an added token. None: the file's change no begin of a text."""
    from tokenizers import normalizers, pre_tokenizers

    steps = [_steps(None if part is None else json.loads(part.__getstate__())) for part in (rust.normalizer, rust.pre_tokenizer)]
    found = [[_unchanging(one, normalized) for one in some] for some in steps]
    if found == steps:
        return None
    changed = next((n for n, (one, other) in enumerate(zip(found[1], steps[1])) if one != other), 0)
    normalizer = _made(normalizers.Sequence([]), "normalizers", [one for one in found[0] if one is not None])
    splits, rest = (_made(pre_tokenizers.Sequence([]), "pretokenizers", some) for some in (found[1][:changed], found[1][changed:]))
    return _Parts(normalizer, rust.pre_tokenizer, splits, rest)


def _steps(state: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The states of the parts of a part of a tokenizer, in their order."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [one for part in state["normalizers" if "normalizers" in state else "pretokenizers"] for one in _steps(part)]


def _made(part: Any, name: str, states: list[Any]) -> Any:
    """A sequence of the parts of these states. None: there are none."""
    if not states:
        return None
    part.__setstate__(json.dumps({"type": "Sequence", name: states}).encode())
    return part


def _unchanging(state: dict[str, Any], normalized: bool | None) -> dict[str, Any] | None:
    """The state of a part that leaves the begin of a text as it is. None: the part does nothing else.

    Normalizers run on what is between added tokens that are not ``normalized``, pre-tokenizers on what is between any of them.
    """
    kind, begins = state["type"], normalized is None
    if kind == "Prepend" and normalized is not False:
        return None
    if kind == "Strip" and normalized is not False:
        return {**state, "strip_left": False}
    if kind == "Metaspace" and (state["prepend_scheme"] == "first" or begins):
        return {**state, "prepend_scheme": "never"}
    if kind == "ByteLevel" and "add_prefix_space" in state and begins:
        return {**state, "add_prefix_space": False}
    return state
