"""Whole answers as JSON, and how large they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

PIECE = 4096
"""Values that are written at once."""
OF_TEXT = 4
"""Bytes of a token's text, about."""
OF_PROMPT = 80
"""Of a log probability in ``prompt_logprobs``."""


def written(model: BaseModel, **fields: str) -> str:
    """JSON of a model, with fields that are JSON already. pydantic holds Python's lock while it writes, so it gets no large objects."""
    rest = model.model_dump_json(exclude={*fields})
    more = [f',"{name}":{value}' for name, value in fields.items()]
    return "".join([rest[:-1], *more, "}"])


def answered(answer: BaseModel, choices: Iterable[str], **fields: str) -> bytes:
    """JSON of an answer, with choices and other fields that are JSON already."""
    return written(answer, choices=f"[{','.join(choices)}]", **fields).encode()


def to_pieces(values: Sequence[Any]) -> str:
    """JSON of a list of many numbers or texts."""
    return f"[{','.join(to_json(list(values[n : n + PIECE])).decode()[1:-1] for n in range(0, len(values), PIECE))}]"


def prompt_size(tokens: int, logprobs: int | None) -> int:
    """Bytes of ``prompt_logprobs``, about."""
    return 0 if logprobs is None else OF_PROMPT * tokens * (1 + logprobs)
