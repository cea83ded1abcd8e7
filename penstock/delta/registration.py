"""What tools know of the family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.derivatives import Tensors
from ..call.families import Registered, Trial, register
from . import functional, slices
from .operators import ADVANCE, DELTA, FAMILY
from .variants import VARIANTS

SIZES = {"B": 2, "N": 2, "T": 70, "G": 2, "H": 2, "J": 2, "K": 24, "V": 40}
IN_PLACE = SIZES | {"B": 3, "N": 3, "T": 67, "P": 4}
HEADS = {"K": 64, "V": 64}
RAW = ("raw", "A_log", "dt_bias")
"""Arguments of raw gates."""


def _draw(variant: str, sizes: Mapping[str, int], random: torch.Generator, gates: str) -> dict[str, Tensor]:
    from . import samples  # only tools need it

    return samples.draw(variant, sizes, random, gates)


def _loop(variant: str, x: Mapping[str, Tensor], scale: float, state: Tensor | None) -> tuple[Tensor, Tensor]:
    from . import samples

    return samples.token_loop(variant, x, scale, state)


def _step(variant: str, *given: Tensor | None, state: Tensor, impl: str, slots: Tensor | None = None) -> Tensor:
    q, k, v, g, beta, a, b = given[:7]
    options: dict[str, Any] = {"state": state, "impl": impl, "slots": slots}
    return functional.decode_step(variant, q, k, v, g, beta, a, b, **options)  # type: ignore[arg-type]


def _rounded(bits: int) -> Sequence[Callable[[Any], Tensors]]:
    from . import rounded

    return rounded.formulas(bits)


def _rounded_in_place(bits: int) -> Sequence[Callable[[Any], Tensors]]:
    from . import rounded

    return rounded.advances(bits)


def _compiled(arch: str) -> Sequence[Any]:
    from .triton.ahead import configurations  # needs Triton

    return configurations(arch)


CANONICAL = (False, False, False, None)
"""Options of calls without raw inputs."""
register(
    Registered(
        "delta",
        FAMILY,
        {name: getattr(functional, name) for name in VARIANTS},
        (
            Trial(DELTA, SIZES, (None, True, *CANONICAL), common=HEADS, omitted=RAW, rounded=_rounded),
            Trial(ADVANCE, IN_PLACE, (None, *CANONICAL), {"slots": (3, -1, 0)}, HEADS, omitted=RAW, rounded=_rounded_in_place),
        ),
        "token loop",
        {"advance": functional.advance, "decode_step": functional.decode_step, "summary": slices.summary},
        _draw,
        _step,
        _loop,
        compiled=_compiled,
    )
)
