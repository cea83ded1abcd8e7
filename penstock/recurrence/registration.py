"""What tools know of the family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.derivatives import Tensors
from ..call.families import Registered, Trial, register
from . import functional, slices
from .operators import ADVANCE, FAMILY, RECURRENCE, SUMMARY
from .variants import VARIANTS

SIZES = {"B": 2, "N": 2, "T": 70, "G": 2, "H": 2, "K": 24, "V": 40}
HEADS = {"K": 64, "V": 64}


def _rounded(bits: int) -> Sequence[Callable[[Any], Tensors]]:
    from . import rounded  # only tools need it

    return rounded.formulas(bits)


def _rounded_in_place(bits: int) -> Sequence[Callable[[Any], Tensors]]:
    from . import rounded

    return rounded.advances(bits)


def _rounded_summary(bits: int) -> Sequence[Callable[[Any], Tensors]]:
    from . import rounded

    return rounded.summaries(bits)


def _draw(variant: str, sizes: Mapping[str, int], random: torch.Generator, gates: str) -> dict[str, Tensor]:
    from . import samples

    return samples.draw(variant, sizes, random, gates)


def _tables(arch: str) -> str:
    """The sources of block sizes for an architecture, in the order of precedence."""
    from .triton.table_file import read, shipped, user_path

    own, measured, path = read(user_path(arch), arch), shipped(arch), user_path(arch)
    first = f"{len(own)} entries of {path}" if own else f"no entries of yours ({path})"
    return f"{first}, then {len(measured)} shipped, then by rule"


def _compiled(arch: str) -> Sequence[Any]:
    from .triton.ahead import configurations  # needs Triton

    return configurations(arch)


def _tuning() -> Any:
    from .triton.tuning import TUNING

    return TUNING


register(
    Registered(
        "recurrence",
        FAMILY,
        {name: getattr(functional, name) for name in VARIANTS},
        (
            Trial(RECURRENCE, SIZES, (None, False, True), common=HEADS, rounded=_rounded),
            Trial(ADVANCE, SIZES | {"B": 3, "N": 3, "T": 67, "P": 4}, (None,), {"slots": (3, -1, 0)}, HEADS, rounded=_rounded_in_place),
            Trial(SUMMARY, SIZES, (None, False, False), rounded=_rounded_summary),
        ),
        "token loop",
        {"advance": functional.advance, "decode_step": functional.decode_step, "summary": slices.summary},
        _draw,
        functional.decode_step,
        tables=_tables,
        compiled=_compiled,
        tuning=_tuning,
    )
)
