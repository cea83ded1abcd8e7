"""Tokenizers of public models: RWKV World, Hugging Face ``tokenizers``, and bytes.

All have the interface of ``Tokenizer``. Text is decoded whole or token by token; a decoder never splits a character:

>>> tokenizer = Bytes()
>>> stream = tokenizer.stream()
>>> [stream.push(token) for token in tokenizer.encode("aé")]
['a', '', 'é']
"""

from __future__ import annotations

import codecs
from ast import literal_eval
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..errors import Complaints, MissingExtra, RangeError, shortened
from ..files import read_text
from .checkpoints import recognised
from .checkpoints.archive import Archive
from .checkpoints.places import refuse_missing
from .tokenizer_arguments import check_token, utf8
from .tokenizer_json import HF_FILE, HuggingFace, json_object

WORLD_VOCAB = "rwkv_vocab_v20230424.txt"
"""The vocabulary of RWKV World, as its authors and Hugging Face repositories name it."""
WORLD_SIZES = range(65530, 65537)
"""65,530 ids; published models have rows for 65,536."""


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
        return list(utf8(text, special, after))

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
        utf8(text, special, after)
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
        check_token(token, len(self._values))
        value = self._values[token]
        if self._whole and value.isascii():  # in 0.1 us; the decoder takes 0.6
            return value.decode("ascii")
        text = self._decoder.decode(value)
        self._whole = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._decoder.decode(b"", final=True)


def ends_of(tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end an answer: those that a tokenizer has as ``ends``, or its ``end_of_text``."""
    end = getattr(tokenizer, "end_of_text", None)
    return getattr(tokenizer, "ends", frozenset() if end is None else frozenset([end]))


def special_tokens_of(tokenizer: Tokenizer | None) -> Mapping[str, int]:
    """The tokens that have names and no text, by their names: those that a tokenizer has as ``special_tokens``."""
    found: Mapping[str, int] = getattr(tokenizer, "special_tokens", {})
    return found


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
    found = json_object(path / "config.json").get("vocab_size") if path.is_dir() else None
    if type(found) is int:
        return found
    archive, form = recognised(Archive(path))
    return form.config(archive).vocab_size
