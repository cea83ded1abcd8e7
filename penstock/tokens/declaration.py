"""Arguments, options and results that declarations of families over tokens share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..call.declaration import Argument, Option, Result, Sizes, Values
from ..call.validation import finite
from .decays import log_decay
from .dtypes import state_dtype


def queries_keys_values(query: str = "") -> tuple[Argument, Argument, Argument]:
    """q, k and v. ``query``: the name of q in messages."""
    shared = f"k has as many heads as {query or 'q'}; k.repeat_interleave(n, 2) repeats each of its heads n times."

    def of_heads(k: Tensor, sizes: Sizes) -> str:
        return shared if k.dim() == 4 and k.shape[2] != sizes.get("G") else ""

    return (
        Argument("q", "B T G K", label=query, gradient=True, hint="Tokens come before heads."),
        Argument("k", "B T G K", like="q", gradient=True, hint=of_heads),
        Argument("v", "B T H V", like="q", gradient=True, hint="Tokens come before heads."),
    )


def decay(
    axes: str, label: str, nullable: bool, derived: bool, hint: str | Callable[[Tensor, Sizes], str], values: Values = log_decay
) -> Argument:  # fmt: skip
    """The log decay g with some of the axes B, T, H and K; none if the signature has no decay."""
    return Argument(
        "g", axes, label=label, nullable=nullable, gradient=True, values=values, draw=F.logsigmoid,
        derived=derived, absent="" if axes else "this variant has no decay", hint=hint,
    )  # fmt: skip


INITIAL_STATE = Argument("initial_state", "N H K V", required=False, gradient=True, hint="A state has the heads of v.")
AXES: dict[str, Any] = {"nonempty": "G H K V", "counts": "B T N", "folded": "G H"}
"""What signatures say about these axes."""


def scale(default: Callable[[Sizes, Any], float]) -> Option:
    """The scale of q. ``default``: its value for None, by sizes and ``Signature.about``."""
    return Option("scale", "float", optional=True, values=finite, resolve=lambda x, sizes, about: default(sizes, about) if x is None else x)


REVERSE, OUTPUT_FINAL_STATE = Option("reverse", "bool"), Option("output_final_state", "bool")
OUTPUT = Result("output", "B T H V")
FINAL_STATE = Result("final_state", "N H K V", dtype=state_dtype, wanted="output_final_state")
