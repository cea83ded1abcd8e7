"""The two operators of the recurrence, and the implementations that both share.

The order is by measured speed (benchmarks/NOTES.md, "CPU: which implementation"): on 2 threads of a Zen 3 server at float32, ``cpu`` was
the fastest at every shape tried, so it stands first; float64 it refuses, and there ``chunkwise`` is faster than the others from 2 tokens
up. On a GPU, ``cuda`` takes short calls that do not fill it, the token-serial Triton kernels the shortest and updates in place, the chunked
ones the rest. ``parallel`` and ``reference`` are there to be named.
"""

from __future__ import annotations

from ..call.dispatch import Family
from ..call.operator import Operator
from . import chunkwise, cpu, cuda, parallel, reference, triton
from .declaration import ADVANCE_OPTIONS, OPTIONS, RESULTS, Advance, Recurrence, in_place, over_sequences
from .variants import VARIANTS

FAMILY = Family(
    cpu.IMPLEMENTATION,
    cuda.IMPLEMENTATION,
    triton.RECURRENT,
    triton.CHUNKWISE,
    chunkwise.IMPLEMENTATION,
    parallel.IMPLEMENTATION,
    reference.IMPLEMENTATION,
)
RECURRENCE = Operator(
    "recurrence", Recurrence, [over_sequences(row) for row in VARIANTS.values()], RESULTS, FAMILY, OPTIONS, chunkwise.forward
)
ADVANCE = Operator(
    "advance",
    Advance,
    [in_place(row, function) for function in ("advance", "decode_step") for row in VARIANTS.values()],
    RESULTS[:1],
    FAMILY,
    ADVANCE_OPTIONS,
)
