"""Tokens of a text that continues another one, where a ``tokenizer.json`` adds a space to the begin of a text."""

from __future__ import annotations

import json
from typing import Any


class Continued:
    """Encodes what follows a token as the end of one whole text.

    Files add a space by a normalizer or a pre-tokenizer, some also after each added token, such as ``</s>``. So the text up to its first
    added token is encoded by the same parts without a space, and by the file's own model. What follows is as in any text.

    rust : tokenizers.Tokenizer
    """

    def __init__(self, rust: Any) -> None:
        self._rust = rust
        self._added = {token: one.content for token, one in rust.get_added_tokens_decoder().items()}
        self._parts = {after_added: _parts(rust, after_added) for after_added in (False, True)}
        """Normalizer and pre-tokenizer after a text and after an added token. None: those of the file."""

    def encode(self, text: str, last: int) -> list[int]:
        """Tokens of a text after the token ``last``."""
        found = self._rust.encode(text, add_special_tokens=False)
        parts, ids = self._parts[last in self._added], list(found.ids)
        if parts is None:
            return ids
        for n, token in enumerate(ids):
            if token in self._added:
                begin, end = found.token_to_chars(n)
                if text[begin:end].strip() == self._added[token]:  # an unknown character may have the token of an added text
                    return [*self._model_tokens(text[:begin], *parts), *ids[n:]]
        return self._model_tokens(text, *parts)

    def _model_tokens(self, text: str, normalizer: Any, pre_tokenizer: Any) -> list[int]:
        """Tokens of a text without added ones."""
        if not text:
            return []
        text = text if normalizer is None else normalizer.normalize_str(text)
        pieces = [text] if pre_tokenizer is None else [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]
        model = self._rust.model
        return [token.id for piece in pieces for token in model.tokenize(piece)]


def _parts(rust: Any, after_added: bool) -> tuple[Any, Any] | None:
    """Normalizer and pre-tokenizer without what adds spaces to the begin of a text. None: the file's add none."""
    from tokenizers import normalizers, pre_tokenizers

    given = [None if part is None else json.loads(part.__getstate__()) for part in (rust.normalizer, rust.pre_tokenizer)]
    found = [_without_space(part, after_added) for part in given]
    if found == given:
        return None
    return _made(normalizers.Sequence([]), found[0]), _made(pre_tokenizers.Sequence([]), found[1])


def _made(part: Any, state: dict[str, Any] | None) -> Any:
    """The part of a tokenizer that has a state. It takes any state of its kind."""
    if state is None:
        return None
    part.__setstate__(json.dumps(state).encode())
    return part


def _without_space(state: dict[str, Any] | None, after_added: bool) -> dict[str, Any] | None:
    """The state of a part of a tokenizer, or None for one that only adds a space."""
    kind = None if state is None else state["type"]
    if state is None or (kind == "Prepend" and not after_added):
        return None
    if kind == "Sequence":
        name = "normalizers" if "normalizers" in state else "pretokenizers"
        parts = [_without_space(one, after_added) for one in state[name]]
        return {**state, name: [one for one in parts if one is not None]}
    if kind == "Metaspace" and (state["prepend_scheme"] == "first" or not after_added):
        return {**state, "prepend_scheme": "never"}
    if kind == "ByteLevel" and "add_prefix_space" in state and not after_added:
        return {**state, "add_prefix_space": False}
    return state
