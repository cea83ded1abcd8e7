"""English text that every CPython ships, as bytes: the language reference behind ``help("topics")``."""

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

    Topics quote each other at length. Every paragraph is kept once only, so that a part held out is not also learned.

    Raises PenstockError where this Python comes without ``pydoc_data``.

    >>> python_topics()[:22]
    b'The "assert" statement'
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ModuleNotFoundError as missing:
        raise PenstockError(
            f"python_topics: the standard library must be whole, got one without {missing.name}. "
            "Some distributions leave it out: install their full Python, or use another text."
        ) from missing
    paragraphs = "\n\n".join(topics[name].strip("\n") for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def split(text: bytes, held_out: float = 0.1) -> Text:
    """Cut a text in two: its last part, a share of ``held_out`` between 0 and 1, is never trained on.

    >>> [len(part) for part in split(bytes(50))]
    [45, 5]
    """
    everything = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    at = round(len(text) * (1 - held_out))
    return Text(everything[:at], everything[at:])
