"""What tools know of the family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..call.families import Registered, Trial, register
from . import functional
from .operators import ADVANCE, DELTA, FAMILY
from .variants import VARIANTS

SIZES = {"B": 2, "N": 2, "T": 70, "G": 2, "H": 2, "J": 2, "K": 24, "V": 40}
HEADS = {"K": 64, "V": 64}
RAW = ("raw", "A_log", "dt_bias")
"""Arguments of raw gates."""


def _draw(variant: str, sizes: Mapping[str, int], random: torch.Generator, gates: str) -> dict[str, Tensor]:
    from . import samples  # only tools need it

    return samples.draw(variant, sizes, random, gates)


def _step(variant: str, *given: Tensor | None, state: Tensor, impl: str) -> Tensor:
    q, k, v, g, beta, a, b = given[:7]
    options: dict[str, Any] = {"state": state, "impl": impl}
    return functional.decode_step(variant, q, k, v, g, beta, a, b, **options)  # type: ignore[arg-type]


CANONICAL = (False, False, False, None)
"""Options of calls without raw inputs."""
FROM_RAW = (True, True, False, None)


register(
    Registered(
        "delta",
        FAMILY,
        {name: getattr(functional, name) for name in VARIANTS},
        (
            Trial(DELTA, SIZES, (None, True, *CANONICAL), common=HEADS, omitted=RAW),
            Trial(ADVANCE, SIZES | {"B": 3, "N": 3, "T": 67, "P": 4}, (None, *CANONICAL), {"slots": (3, -1, 0)}, HEADS, omitted=RAW),
        ),
        "token loop",
        {"advance": functional.advance, "decode_step": functional.decode_step},
        _draw,
        _step,
    )
)
