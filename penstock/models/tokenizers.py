"""Tokenizers of public models: RWKV World, Hugging Face ``tokenizers``, and bytes.

All have the interface of ``Tokenizer``. Text is decoded whole or token by token; a decoder never splits a character:

>>> tokenizer = Bytes()
>>> stream = tokenizer.stream()
>>> [stream.push(token) for token in tokenizer.encode("aé")]
['a', '', 'é']
"""

from __future__ import annotations

import codecs
import json
import re
from ast import literal_eval
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ..errors import Complaints, DtypeError, MissingExtra, RangeError, described, shortened
from ..files import read_text
from .checkpoints import recognised
from .checkpoints.archive import Archive
from .checkpoints.places import refuse_missing, refuse_stand_in
from .continued import Continued

WORLD_VOCAB = "rwkv_vocab_v20230424.txt"
"""The vocabulary of RWKV World, as its authors and Hugging Face repositories name it."""
WORLD_SIZES = range(65530, 65537)
"""65,530 ids; published models have rows for 65,536."""
HF_FILE = "tokenizer.json"
SPACE = "\u2581"
"""What stands for a space in the tokens of SentencePiece."""
LONGEST = 64
"""Tokens among which the text before a stream is looked for."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]|\+)[0-9A-Fa-f]>")
"""Texts that the package tokenizers reads as bytes."""


class Stream(Protocol):
    """An incremental decoder of one sequence of tokens."""

    def push(self, token: int) -> str:
        """Take the next token; return the text that no later token can change. It may be empty."""

    def finish(self) -> str:
        """Return the rest of the text. Incomplete UTF-8 becomes U+FFFD."""


class Tokenizer(Protocol):
    """Text to tokens and back."""

    vocab_size: int
    """Tokens are below it. Models may have more rows: mask the others when sampling."""
    end_of_text: int | None
    """The token that ends a text."""

    @property
    def token_bytes(self) -> Sequence[bytes | None]:
        """The bytes of each token, possibly a part of a character; empty for special ones. None: they depend on neighbouring tokens."""

    def encode(self, text: str, special: bool = False, after: Sequence[int] = ()) -> list[int]:
        """Tokens of a text. With ``special``, also those that the tokenizer's file adds to a text, for example before it.

        ``after`` are tokens that the text continues: nothing is added to its begin, and ``special`` must be False.
        """

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens. Special tokens have none, and bytes that are not UTF-8 become U+FFFD."""

    def stream(self, after: Sequence[int] = ()) -> Stream:
        """A new incremental decoder of what follows the tokens ``after``. Without these, its texts joined equal ``decode``."""


class Bytes:
    """A token for each byte of UTF-8.

    vocab_size : int
        256, or 257 for an ``end_of_text`` of 256.

    >>> Bytes(257).encode("ab"), Bytes(257).end_of_text
    ([97, 98], 256)
    """

    def __init__(self, vocab_size: int = 256) -> None:
        if vocab_size not in (256, 257):
            complaints = Complaints("Bytes")
            complaints.add(RangeError, "vocab_size", "256, or 257 with a token that ends a text", vocab_size)
            complaints.raise_any()
        self.vocab_size = vocab_size
        self.end_of_text = 256 if vocab_size == 257 else None
        self.token_bytes = [bytes([byte]) for byte in range(256)] + [b""] * (vocab_size - 256)
        """The bytes of each token; none for the end of text."""

    def encode(self, text: str, special: bool = False, after: Sequence[int] = ()) -> list[int]:
        """The bytes of a text."""
        return list(_utf8(text, special, after))

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens."""
        return text_after(self, tokens)

    def stream(self, after: Sequence[int] = ()) -> ByteStream:
        """A new incremental decoder. No text depends on the tokens before it; parts of a character are decoded with those that follow."""
        return ByteStream(self.token_bytes)


class World:
    """RWKV World: the longest of 65,529 byte strings at each place. Needs the package pyrwkv-tokenizer.

    file : Path, optional
        A vocabulary in the format of ``rwkv_vocab_v20230424.txt``. Default: the published one.

    >>> World().encode("Hello world")
    [33155, 40213]
    """

    vocab_size = WORLD_SIZES[0]
    end_of_text: int | None = 0

    def __init__(self, file: Path | None = None) -> None:
        try:
            import pyrwkv_tokenizer
        except ImportError as error:
            raise MissingExtra.of("World", "pyrwkv-tokenizer", "models") from error
        file = Path(file or Path(pyrwkv_tokenizer.__file__).with_name(WORLD_VOCAB))
        self.token_bytes = [b""] * self.vocab_size
        """The bytes of each token; none for special ones."""
        try:
            for line in read_text(file, "World", "file").rstrip("\n").split("\n"):
                token, _, rest = line.partition(" ")
                text, _, size = rest.rpartition(" ")
                value = literal_eval(text)
                value = value.encode() if isinstance(value, str) else value
                if not 0 < int(token) < self.vocab_size or not isinstance(value, bytes) or not 0 < len(value) == int(size):
                    raise ValueError(f"the line {shortened(line)}")
                self.token_bytes[int(token)] = value
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            complaints = Complaints("World")
            complaints.add(RangeError, "file", "a vocabulary of RWKV World", f"{str(file)!r} ({error})")
            complaints.raise_any()
        self._file = file
        # only for encoding: its decode panics on bytes that are not UTF-8
        self._rust = pyrwkv_tokenizer.RWKVTokenizer(vocab_filepath=str(file))

    def __reduce__(self) -> tuple[type[World], tuple[Path]]:
        return World, (self._file.absolute(),)

    def encode(self, text: str, special: bool = False, after: Sequence[int] = ()) -> list[int]:
        """Tokens of a text, by greedy longest match."""
        _utf8(text, special, after)
        tokens: list[int] = self._rust.encode(text)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens."""
        return text_after(self, tokens)

    def stream(self, after: Sequence[int] = ()) -> ByteStream:
        """A new incremental decoder. No text depends on the tokens before it; parts of a character are decoded with those that follow."""
        return ByteStream(self.token_bytes)


class ByteStream:
    """The decoder of tokens that are byte strings."""

    def __init__(self, values: Sequence[bytes]) -> None:
        self._values = values
        self._whole = True
        """Whether no character is incomplete."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Take the next token; return the text that no later token can change."""
        _check_token(token, len(self._values))
        value = self._values[token]
        if self._whole and value.isascii():  # in 0.1 us; the decoder takes 0.6
            return value.decode("ascii")
        text = self._decoder.decode(value)
        self._whole = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._decoder.decode(b"", final=True)


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
            given = _json(folder / name).get("eos_token_id")
            several = given if isinstance(given, list) else [given]
            if found := [one for one in several if type(one) is int and 0 <= one < self.vocab_size]:
                break
        given = _json(folder / "tokenizer_config.json").get("eos_token")  # a model for chats may have the files of its base model beside
        given = given.get("content") if isinstance(given, dict) else given
        token = self._rust.token_to_id(given) if isinstance(given, str) else None
        return found if token is None or token in found else [*found, token]

    def encode(self, text: str, special: bool = False, after: Sequence[int] = ()) -> list[int]:
        """Tokens of a text; with ``special``, also those that the file adds; of one that continues ``after``, without a space before it."""
        _utf8(text, special, after)
        if len(after):
            return self._continued.encode(text, int(after[-1]))
        return list(self._rust.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens."""
        tokens = list(tokens)
        for token in tokens:
            _check_token(token, self.vocab_size)
        # the package does not skip special tokens that are found in the normalized text
        shown = [token for token in map(int, tokens) if token in self.text_tokens]
        return str(self._rust.decode(shown, skip_special_tokens=False))

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
        _check_token(token, self._tokenizer.vocab_size)
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


def ends_of(tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end an answer: those that a tokenizer has as ``ends``, or its ``end_of_text``."""
    end = getattr(tokenizer, "end_of_text", None)
    return getattr(tokenizer, "ends", frozenset() if end is None else frozenset([end]))


def text_after(tokenizer: Tokenizer, tokens: Iterable[int], after: Sequence[int] = ()) -> str:
    """The text that tokens add to that of the tokens ``after``. ``decode`` may remove a space from its begin."""
    stream = tokenizer.stream(after)
    return "".join([*map(stream.push, tokens), stream.finish()])


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that belongs to a checkpoint.

    path : str or Path
        A checkpoint file or folder, or a ``tokenizer.json``. A ``tokenizer.json`` or a World vocabulary in the folder decides for a
        folder. A file's number of embeddings decides first: 65,536 are World, 256 and 257 bytes.

    Raises RangeError if no tokenizer is found, MissingExtra if its package is not installed, and for files without ``tokenizer.json``
    what ``load`` raises.
    """
    path = Path(path)
    complaints = Complaints("load_tokenizer")
    refuse_missing("load_tokenizer", "path", path, found=f"Pass a {HF_FILE}, or a checkpoint with its tokenizer.")
    if path.name == HF_FILE:
        return HuggingFace(path)
    folder = path if path.is_dir() else path.parent
    by_size = None if path.is_dir() else _of_size(_vocab_size(path))
    if by_size is not None:
        return by_size
    if (folder / HF_FILE).is_file():
        return HuggingFace(folder / HF_FILE)
    if path.is_dir():
        by_size = World(folder / WORLD_VOCAB) if (folder / WORLD_VOCAB).is_file() else _of_size(_vocab_size(path))
        if by_size is not None:
            return by_size
    rule = f"a checkpoint with {HF_FILE} in its folder, or with 65,536 (World), 256 or 257 (bytes) embeddings"
    complaints.add(RangeError, "path", rule, repr(str(path)), f"Put the {HF_FILE} of the model in {str(folder)!r}.")
    complaints.raise_any()
    raise AssertionError


def _of_size(vocab_size: int) -> Tokenizer | None:
    if vocab_size in (256, 257):
        return Bytes(vocab_size)
    return World() if vocab_size in WORLD_SIZES else None


def _vocab_size(path: Path) -> int:
    """The number of embeddings of a checkpoint."""
    found = _json(path / "config.json").get("vocab_size") if path.is_dir() else None
    if type(found) is int:
        return found
    archive, form = recognised(Archive(path))
    return form.config(archive).vocab_size


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of byte-level tokens stands for. Those from 256 on stand for what cannot be printed."""
    from tokenizers.pre_tokenizers import ByteLevel

    characters = sorted(ByteLevel.alphabet())
    found = {character: ord(character) for character in characters if ord(character) < 256}
    rest = sorted({*range(256)} - {*found.values()})
    return found | dict(zip(characters[len(found) :], rest))


def _json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    try:
        content = json.loads(file.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _utf8(text: str, special: bool, after: Sequence[int]) -> bytes:
    """UTF-8 of a text. Raises DtypeError for another type, RangeError for lone surrogates, or special tokens in the middle of a text."""
    complaints = Complaints("encode")
    if special and len(after):
        rule = "False for a text that continues tokens"
        complaints.add(RangeError, "special", rule, special, "Files add special tokens to a whole text.")
        complaints.raise_any()
    if not isinstance(text, str):
        complaints.add(DtypeError, "text", "a str", described(text))
        complaints.raise_any()
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        complaints.add(RangeError, "text", "free of lone surrogates", shortened(error.object[error.start : error.end]))
        complaints.raise_any()
        raise


def _check_token(token: int, vocab_size: int) -> None:
    if type(token) is int and 0 <= token < vocab_size:
        return
    complaints = Complaints("decode")
    if not hasattr(token, "__index__"):
        complaints.add(DtypeError, "token", "a whole number", described(token))
        complaints.raise_any()
    if not 0 <= token < vocab_size:
        complaints.add(RangeError, "token", f"from 0 to {vocab_size - 1}", token, "Use the tokenizer that belongs to the model.")
        complaints.raise_any()
