"""What tools know of the family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..call.families import Registered, Trial, register
from .declaration import FUNCTION
from .functional import softmax_attention
from .operators import ATTENTION, FAMILY
from .reference import BUDGET

TRIAL = Trial(ATTENTION, {"B": 2, "Tq": 70, "Tk": 130, "H": 4, "G": 2, "D": 40}, (True, None, 90, True), budget=BUDGET)


def _compiled(arch: str) -> Sequence[Any]:
    from .triton.ahead import configurations  # needs Triton

    return configurations(arch)


register(Registered("softmax", FAMILY, {FUNCTION: softmax_attention}, (TRIAL,), "formula", compiled=_compiled))
