"""Training text: files to tokens, tokens to samples.

A corpus is a row of tokens and the positions where documents begin. Samples are windows of equal length. In fixed-length samples
the state is carried through the whole window; in packed samples it is reset at each document.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import Complaints, MissingExtra, RangeError, shortened
from ..files import read_text
from ..models.tokenizers import Tokenizer

IGNORED = -100
"""Label of the tokens whose next token is not predicted."""
FILLER = -1
"""The index of a sample without labels, which completes a batch."""
BINARY = (".bin", ".npy")


class Corpus(NamedTuple):
    """Tokens of all documents, one after the other."""

    tokens: Any
    """Integers [N]: a numpy array, in memory or mapped from a file."""
    begins: Tensor
    """int64 [D]: where documents begin; the first is 0."""


def is_text(file: Path) -> bool:
    """Whether a file has text, which a separator may divide into documents."""
    return _kind(file) not in BINARY and not is_lines(file)


def is_lines(file: Path) -> bool:
    """Whether each line of a file is an object of JSON with a document."""
    return _kind(file) == ".jsonl"


def _kind(file: Path) -> str:
    """What a file's name says about its content."""
    return file.suffix.lower()


def find_files(patterns: Sequence[str], function: str, argument: str) -> list[Path]:
    """The files of names and glob patterns, each pattern's in alphabetical order. Raises RangeError for a pattern without files."""
    complaints, found = Complaints(function), []
    for pattern in patterns:
        files = [Path(name) for name in sorted(glob(pattern, recursive=True)) if Path(name).is_file()]
        if not files:
            complaints.add(RangeError, argument, "files that exist, or patterns of them", repr(pattern))
        found += files
    complaints.raise_any()
    return found


def read(
    files: Sequence[Path], tokenizer: Tokenizer, separator: str | None = None, *, argument: str = "data", divided: bool = True
) -> Corpus:  # fmt: skip
    """The tokens of text files, ``.jsonl`` files, ``.npy`` files (integers [N]) and ``.bin`` files (uint16 [N], native byte order).

    A text file is UTF-8, of which every character is kept; it is one document, or several with ``separator`` between them, which is left
    out and must be in at least one of the text files if they are to be ``divided``. Each line of a ``.jsonl`` file is an object, whose
    ``"text"`` is a document. Each document is followed by the tokenizer's ``end_of_text``, if it has one. In token files, a document ends
    after an ``end_of_text``. A single token file is mapped, not read. ``argument`` is the name of the files in messages.

    Raises RangeError for files that are not as above, have tokens the tokenizer does not know, or hold no tokens.
    """
    numpy = _numpy()
    kind = numpy.uint16 if tokenizer.vocab_size <= 2**16 else numpy.int32
    parts, texts = [], list[tuple[Path, int]]()
    for file in files:
        if is_text(file):
            documents = _split(file, separator, argument)
            texts.append((file, len(documents)))
            parts.append(_encoded(documents, tokenizer, kind))
        elif is_lines(file):
            parts.append(_encoded(_of_lines(file, argument), tokenizer, kind))
        else:
            parts.append(_tokens(file, tokenizer, argument))
    if separator and divided and texts and all(count == 1 for _, count in texts):
        reason = "which does not have it" if len(texts) == 1 else f"none of {len(texts)} text files has it"
        remedy = "Leave out data.separator if each file is one document, or end the files with it."
        _refuse(argument, texts[0][0], f"text with the separator {separator!r}", reason, remedy)
    lengths = torch.tensor([0, *(len(tokens) for tokens, _ in parts)]).cumsum(0)
    begins = torch.cat([offset + begins for offset, (_, begins) in zip(lengths, parts)])
    if lengths[-1] == 0:
        _refuse(argument, files[0], "files with tokens", "which is empty")
    tokens = parts[0][0] if len(parts) == 1 else numpy.concatenate([tokens for tokens, _ in parts])
    return Corpus(tokens, begins)


def _split(file: Path, separator: str | None, argument: str) -> list[str]:
    """The documents of a text file."""
    text = read_text(file, "train", argument)
    if separator and separator not in text and (windows := separator.replace("\n", "\r\n")) in text:
        remedy = f"Its lines end in a carriage return and a line feed: take {windows!r}."
        _refuse(argument, file, f"a text with the separator {separator!r}", f"which has {windows!r}", remedy)
    return text.split(separator) if separator else [text]


def _of_lines(file: Path, argument: str) -> list[str]:
    """The documents of a file with an object of JSON in each line. Empty lines are left out."""
    documents = []
    for number, line in enumerate(read_text(file, "train", argument).split("\n"), 1):
        if line.strip():
            try:
                documents.append(_text_of(json.loads(line, object_pairs_hook=_Object)))
            except (ValueError, RecursionError) as error:
                reason = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
                remedy = "Convert other files to text, or to tokens."
                _refuse(argument, file, 'lines of JSON, objects with a string "text"', f"line {number}: {reason}", remedy)
    return documents


class _Object(dict[str, Any]):
    """An object of JSON."""

    def __init__(self, fields: list[tuple[str, Any]]) -> None:
        super().__init__(fields)
        self.texts = sum(name == "text" for name, _ in fields)
        """How many texts it has. A dict keeps the last one."""


def _text_of(found: Any) -> str:
    """The text of an object. Raises ValueError."""
    if isinstance(found, _Object) and found.texts > 1:
        raise ValueError('"text" is there several times')
    text = found.get("text") if isinstance(found, _Object) else None
    if not isinstance(text, str):
        raise ValueError(f"no such string in {shortened(found)}")
    text.encode()  # raises an error for half of a surrogate pair
    return text


def _encoded(documents: list[str], tokenizer: Tokenizer, kind: Any) -> tuple[Any, Tensor]:
    """The tokens of documents that are not empty, and where each begins."""
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    rows = [_numpy().array(tokenizer.encode(document) + end, dtype=kind) for document in documents if document]
    lengths = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return _numpy().concatenate([_numpy().empty(0, kind), *rows]), lengths[:-1]


def _tokens(file: Path, tokenizer: Tokenizer, argument: str) -> tuple[Any, Tensor]:
    numpy = _numpy()
    try:
        tokens = numpy.load(file, mmap_mode="r") if _kind(file) == ".npy" else numpy.memmap(file, numpy.uint16, "r")
    except (OSError, ValueError, EOFError) as error:
        _refuse(argument, file, "a file of tokens", str(error))
    if not isinstance(tokens, numpy.ndarray):
        tokens.close()
        _refuse(argument, file, "a file of tokens", "an archive of arrays, as numpy.savez writes", "Save one array with numpy.save.")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        _refuse(argument, file, "a row of integers", f"{tokens.dtype} of shape {list(tokens.shape)}")
    least, most = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
    if least < 0 or most >= tokenizer.vocab_size:
        rule = f"tokens from 0 to {tokenizer.vocab_size - 1}"
        _refuse(argument, file, rule, str(least if least < 0 else most), "Use the tokenizer that they were made with.")
    ends = numpy.flatnonzero(tokens == tokenizer.end_of_text) + 1 if tokenizer.end_of_text is not None else ()
    begins = [0, *(int(end) for end in ends if end < len(tokens))]
    return tokens, torch.tensor(begins[: len(tokens)], dtype=torch.int64)


def _refuse(argument: str, file: Path, rule: str, reason: str, remedy: str = "") -> None:
    complaints = Complaints("train")
    complaints.add(RangeError, argument, rule, f"{str(file)!r} ({reason})", remedy)
    complaints.raise_any()


class Windows(Dataset[dict[str, Tensor]]):
    """Samples of ``length`` tokens. The remainder of the corpus is left out.

    Each is a dict of ``ids`` and ``labels``, int64 [length]: labels are the next tokens. With ``packed``, it also has ``begins``,
    int64 [n], the positions in the window where documents begin, including 0; and a document's last label is ``IGNORED``. ``most`` limits
    the number of samples. ``argument`` is the name of the corpus in messages. The sample ``FILLER`` has no labels.
    """

    def __init__(self, corpus: Corpus, length: int, *, packed: bool = False, most: int | None = None, argument: str = "data") -> None:
        self.corpus, self.length, self.packed, self.most = corpus, length, packed, most
        if len(self) == 0:
            complaints = Complaints("train")
            value = f"{len(corpus.tokens)} tokens"
            complaints.add(RangeError, argument, f"at least length + 1 = {length + 1} tokens", value, "Take more text or a smaller length.")
            complaints.raise_any()
        if self.counted == 0:
            complaints = Complaints("train")
            rule, remedy = "of documents of at least two tokens", "No token has one to predict: see data.packing and data.separator."
            complaints.add(RangeError, argument, rule, "only documents of one", remedy)
            complaints.raise_any()

    def __len__(self) -> int:
        return self.whole if self.most is None else min(self.whole, self.most)

    @property
    def whole(self) -> int:
        """Samples of the whole corpus."""
        return max(len(self.corpus.tokens) - 1, 0) // self.length

    @property
    def counted(self) -> float:
        """The mean number of labels per sample that are not ``IGNORED``."""
        tokens, begins = len(self) * self.length, self.corpus.begins
        return self.length - (int(((begins >= 1) & (begins <= tokens)).sum()) / len(self) if self.packed else 0)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not FILLER <= index < len(self):
            raise IndexError(index)
        begin = max(index, 0) * self.length
        window = torch.from_numpy(self.corpus.tokens[begin : begin + self.length + 1].astype("int64"))
        ids, labels = window[:-1], window[1:].clone()
        if index == FILLER:
            labels.fill_(IGNORED)
        if not self.packed:
            return {"ids": ids, "labels": labels}
        first, last = torch.searchsorted(self.corpus.begins, torch.tensor([begin + 1, begin + self.length + 1])).tolist()
        begins = self.corpus.begins[first:last] - begin  # from 1 to length
        labels[begins - 1] = IGNORED
        return {"ids": ids, "labels": labels, "begins": torch.cat([begins.new_zeros(1), begins[begins < self.length]])}


def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of samples: ids and labels [B,length]; packed samples become one row, [1,B*length], with ``cu_seqlens`` int32 [N+1].

    >>> one = {"ids": torch.arange(4), "labels": torch.arange(4), "begins": torch.tensor([0, 3])}
    >>> collate([one, one])["cu_seqlens"]
    tensor([0, 3, 4, 7, 8], dtype=torch.int32)
    """
    ids, labels = (torch.stack([sample[name] for sample in samples]) for name in ("ids", "labels"))
    if "begins" not in samples[0]:
        return {"ids": ids, "labels": labels}
    length = ids.shape[1]
    begins = [sample["begins"] + i * length for i, sample in enumerate(samples)]
    cu_seqlens = torch.cat([*begins, torch.tensor([ids.numel()])]).int()
    return {"ids": ids.view(1, -1), "labels": labels.view(1, -1), "cu_seqlens": cu_seqlens}


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise MissingExtra.of("train", "numpy", "transformers") from error
    return numpy
