"""The training text: the language reference of ``help("topics")``, which CPython ships."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import PenstockError


class Text(NamedTuple):
    """A text in two parts, each a uint8 Tensor [bytes]."""

    train: Tensor
    held_out: Tensor


def python_topics() -> bytes:
    """Return the topics of ``pydoc_data``, about 370 KB of UTF-8, in the order of their names.

    Topics repeat paragraphs of each other. Each paragraph is kept once, so that held-out text is not in the training text.

    Raises PenstockError if this Python has no ``pydoc_data``.

    >>> python_topics()[:22]
    b'The "assert" statement'
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ModuleNotFoundError as missing:
        raise PenstockError(
            f"python_topics: the standard library must be whole, got one without {missing.name}. "
            "Some distributions leave it out: install the full Python."
        ) from missing
    paragraphs = "\n\n".join(topics[name].strip("\n") for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def split(text: bytes, held_out: float = 0.1) -> Text:
    """Split a text: its last part, a fraction ``held_out`` between 0 and 1, is for evaluation.

    >>> [len(part) for part in split(bytes(50))]
    [45, 5]
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    at = round(len(text) * (1 - held_out))
    return Text(data[:at], data[at:])
