"""The operators of the recurrence, and their implementations. Those over sequences and in place share theirs.

The order is by measured speed (benchmarks/NOTES.md, "CPU: which implementation"): on 2 threads of a Zen 3 server at float32, ``cpu`` was
the fastest at every shape tried, so it is first. It refuses float64, for which ``chunkwise`` is the fastest from 2 tokens on. On a
GPU, ``cuda`` takes short calls that do not fill the GPU, the token-serial Triton kernels take the shortest calls and updates in place, and
the chunked kernels take the rest. ``parallel`` and ``reference`` only run by name.
"""

from __future__ import annotations

from ..call.dispatch import Family
from ..call.operator import Operator
from . import chunkwise, cpu, cuda, parallel, reference, summary, triton
from .declaration import (
    ADVANCE_OPTIONS,
    OPTIONS,
    RESULTS,
    SUMMARY_OPTIONS,
    SUMMARY_RESULTS,
    Advance,
    Recurrence,
    Summary,
    in_place,
    over_sequences,
    summed,
)
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
    "recurrence", Recurrence, [over_sequences(row) for row in VARIANTS.values()], RESULTS, FAMILY, OPTIONS,
    lambda p: chunkwise.forward(p.whole),
)  # fmt: skip
Advance.sequences = RECURRENCE
ADVANCE = Operator(
    "advance",
    Advance,
    [in_place(row, function) for function in ("advance", "decode_step") for row in VARIANTS.values()],
    RESULTS[:1],
    FAMILY,
    ADVANCE_OPTIONS,
)
SUMMARY = Operator(
    "summary",
    Summary,
    [summed(row) for row in VARIANTS.values()],
    SUMMARY_RESULTS,
    Family(triton.SUMMARY, *summary.IMPLEMENTATIONS),
    SUMMARY_OPTIONS,
    lambda p: summary.forward(p.whole),
)
