"""The operators of the delta rule, over sequences and in place, and their implementations in the order of ``impl="auto"``."""

from __future__ import annotations

from ..call.dispatch import Family
from ..call.operator import Operator
from . import chunkwise, reference, triton
from .declaration import ADVANCE_OPTIONS, OPTIONS, RESULTS, Advance, Delta, in_place, over_sequences
from .variants import VARIANTS

FAMILY = Family(triton.RECURRENT, triton.CHUNKWISE, chunkwise.IMPLEMENTATION, reference.IMPLEMENTATION)
DELTA = Operator("delta", Delta, [over_sequences(row) for row in VARIANTS.values()], RESULTS, FAMILY, OPTIONS, chunkwise.forward)
Advance.sequences = DELTA
ADVANCE = Operator(
    "delta_advance",
    Advance,
    [in_place(row, function) for function in ("advance", "decode_step") for row in VARIANTS.values()],
    RESULTS[:1],
    FAMILY,
    ADVANCE_OPTIONS,
)
