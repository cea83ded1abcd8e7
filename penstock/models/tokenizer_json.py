"""Tokenizers of the package ``tokenizers``, from a ``tokenizer.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import Complaints, MissingExtra, RangeError
from .checkpoints.places import refuse_stand_in
from .continued import Continued
from .tokenizer_arguments import check_token, refuse_panic, utf8

HF_FILE = "tokenizer.json"
SPACE = "\u2581"
"""What stands for a space in the tokens of SentencePiece."""
LONGEST = 64
"""Tokens among which the text before a stream is looked for."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]|\+)[0-9A-Fa-f]>")
"""Texts that the package tokenizers reads as bytes."""


class HuggingFace:
    """A ``tokenizer.json``. Needs the package tokenizers. The file's ``truncation`` and ``padding`` are not used: texts are whole.

    file : Path
        ``tokenizer.json``. The tokens that end a text are read from ``generation_config.json`` or ``config.json`` beside it, the first
        that names any, and from ``tokenizer_config.json``.
    """

    def __init__(self, file: Path) -> None:
        try:
            from tokenizers import Tokenizer as Rust
        except ImportError as error:
            raise MissingExtra.of("HuggingFace", "tokenizers", "models") from error
        if Path(file).is_file():
            refuse_stand_in("HuggingFace", "file", Path(file))
        try:
            self._rust = Rust.from_file(str(file))
        except Exception as error:  # the package raises plain Exceptions
            complaints = Complaints("HuggingFace")
            complaints.add(RangeError, "file", f"a {HF_FILE} that tokenizers reads", f"{str(file)!r} ({error})")
            complaints.raise_any()
        self._rust.no_truncation()  # programs that made batches leave both in their files
        self._rust.no_padding()
        self._read()
        found = self._find_ends(Path(file).parent)
        self.end_of_text, self.ends = next(iter(found), None), frozenset(found)
        """The first token that ends a text, and all of them: models for chats have others that end a message."""

    def _read(self) -> None:
        vocab = self._rust.get_vocab()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        special = {token for token, added in self._rust.get_added_tokens_decoder().items() if added.special}
        self.text_tokens = set(vocab.values()) - special
        """Tokens that ``decode`` keeps: neither special ones nor ids without a token."""
        self.special_tokens = {text: token for text, token in vocab.items() if token in special}
        """Tokens that ``decode`` leaves out, by what the file calls them."""
        self._decoder = "null" if self._rust.decoder is None else self._rust.decoder.__getstate__().decode()
        """As the file has it."""
        of_bytes = "ByteFallback" in self._decoder
        self.byte_tokens = {token for text, token in vocab.items() if of_bytes and BYTE.fullmatch(text)}
        """Tokens of one byte, such as <0xE4>."""
        self._continued = Continued(self._rust)

    @cached_property
    def token_bytes(self) -> list[bytes | None]:
        """The bytes of each token; none for special ones. Known for tokenizers of bytes, as GPT-2's, and for tokens of one byte."""
        found: list[bytes | None] = [None if token in self.text_tokens else b"" for token in range(self.vocab_size)]
        decoder = json.loads(self._decoder) or {}
        values = _byte_of_character() if [one["type"] for one in decoder.get("decoders", [decoder]) if one] == ["ByteLevel"] else None
        for text, token in self._rust.get_vocab().items():
            if token in self.byte_tokens:
                found[token] = bytes([int(text[3:5], 16)])
            elif token in self.text_tokens and values is not None:  # as its decoder reads them
                known = values.keys() >= set(text)
                found[token] = bytes(map(values.__getitem__, text)) if known else text.encode()
        return found

    @property
    def pieces(self) -> list[bytes] | None:
        """The bytes of each token in the middle of a text, where ``token_bytes`` or marks of spaces tell them; none for special ones."""
        found = self.token_bytes
        if not any(one is None for one in found):
            return [one or b"" for one in found]
        if SPACE not in self._decoder:
            return None
        marked = {token: text.replace(SPACE, " ").encode() for text, token in self._rust.get_vocab().items()}
        return [marked.get(token, b"") if one is None else one for token, one in enumerate(found)]

    def with_texts(self, texts: Collection[str]) -> HuggingFace:
        """A tokenizer whose special tokens of these texts are text: ``decode`` keeps them. This one, if none of its special tokens is."""
        if not any(one.special and one.content in texts for one in self._rust.get_added_tokens_decoder().values()):
            return self
        content, made = json.loads(self.to_json()), copy(self)
        for one in content["added_tokens"]:
            one["special"] &= one["content"] not in texts
        made._rust = self._rust.from_str(json.dumps(content))
        made.__dict__.pop("token_bytes", None)
        made._read()
        return made

    def to_json(self) -> str:
        """The content of a ``tokenizer.json``."""
        return str(self._rust.to_str())

    def _find_ends(self, folder: Path) -> list[int]:
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            given = json_object(folder / name).get("eos_token_id")
            several = given if isinstance(given, list) else [given]
            if found := [one for one in several if type(one) is int and 0 <= one < self.vocab_size]:
                break
        # a model for chats may have the files of its base model beside
        given = json_object(folder / "tokenizer_config.json").get("eos_token")
        given = given.get("content") if isinstance(given, dict) else given
        try:
            token = self._rust.token_to_id(given) if isinstance(given, str) else None
        except UnicodeEncodeError:  # half of a surrogate pair
            token = None
        return found if token is None or token in found else [*found, token]

    def encode(self, text: str, special: bool = False, after: Sequence[int] = ()) -> list[int]:
        """Tokens of a text; with ``special``, also those that the file adds; of one that continues ``after``, without a space before it."""
        utf8(text, special, after)
        try:
            if len(after):
                return self._continued.encode(text, int(after[-1]))
            return list(self._rust.encode(text, add_special_tokens=special).ids)
        except BaseException as error:
            refuse_panic("encode", "text", error)
            raise

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens."""
        tokens = list(tokens)
        for token in tokens:
            check_token(token, self.vocab_size)
        # the package does not skip special tokens that are found in the normalized text
        shown = [token for token in map(int, tokens) if token in self.text_tokens]
        try:
            return str(self._rust.decode(shown, skip_special_tokens=False))
        except BaseException as error:
            refuse_panic("decode", "tokens", error)
            raise

    def stream(self, after: Sequence[int] = ()) -> WindowStream:
        """A new incremental decoder of what follows the tokens ``after``. Some files remove a space from the begin of a text."""
        return WindowStream(self, after)


class WindowStream:
    """The decoder of a tokenizer whose text of a token depends on the tokens before it.

    Decodes the last tokens twice, without and with the new ones; the difference is their text. A run of tokens of bytes is decoded when
    it ends, since one invalid byte changes the text of the whole run.
    """

    def __init__(self, tokenizer: HuggingFace, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = _context(tokenizer, after)
        self._done = len(self._tokens)
        """Tokens at the begin of ``_tokens`` whose text is known."""

    def push(self, token: int) -> str:
        """Take the next token; return the text that no later token can change."""
        check_token(token, self._tokenizer.vocab_size)
        token = int(token)  # a tensor is no member of a set
        if token not in self._tokenizer.text_tokens:
            return ""
        self._tokens.append(token)
        if token in self._tokenizer.byte_tokens:
            return ""
        before, after = self._texts()
        if len(after) <= len(before) or after.endswith("\ufffd"):  # a character may be incomplete
            return ""
        self._tokens, self._done = self._tokens[self._done :], len(self._tokens) - self._done
        return after[len(before) :]

    def finish(self) -> str:
        """Return the rest of the text."""
        before, after = self._texts()
        self._tokens, self._done = [], 0
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        return self._tokenizer.decode(self._tokens[: self._done]), self._tokenizer.decode(self._tokens)


def _context(tokenizer: HuggingFace, before: Sequence[int]) -> list[int]:
    """The last token with a text and the tokens of bytes after it, without an incomplete character."""
    found: list[int] = []
    for token in reversed(before[-LONGEST:]):
        if token in tokenizer.text_tokens:
            found.insert(0, token)
            if token not in tokenizer.byte_tokens:
                break
    while found and tokenizer.decode(found).endswith("\ufffd"):
        found.pop()
    return found


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of byte-level tokens stands for. Those from 256 on stand for what cannot be printed."""
    from tokenizers.pre_tokenizers import ByteLevel

    characters = sorted(ByteLevel.alphabet())
    found = {character: ord(character) for character in characters if ord(character) < 256}
    rest = sorted({*range(256)} - {*found.values()})
    return found | dict(zip(characters[len(found) :], rest))


def json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    try:
        content = json.loads(file.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
