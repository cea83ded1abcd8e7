"""The launches of an update in place: first the chunk kernel, then the token-serial kernel.

The first launch processes the pieces of 64 tokens of each sequence, in order from the beginning of the sequence, without segments. The
second processes the remaining tokens one by one. The state is rounded to the pool's dtype after each piece and each of these tokens. So
results depend neither on where a sequence is cut, if at multiples of 64 or after the last one, nor on the other sequences of a call.

On Hopper the second launch begins while the first runs, if the first one is a single kernel. The programs of sequences without a piece,
which are decode steps, do not wait for it, so both take as long as the longer of the two.

No bit depends on how a kernel is compiled: fused multiply-adds are off, because the compiler may form others for other constants, and sums
across threads have the same order in all forms of a kernel.
"""

from __future__ import annotations

from ...gpu.forms import first
from ...gpu.plan import Plan
from ...gpu.target import Target
from ...tokens.gpu_calls import batch, tokens
from ...tokens.gpu_pieces import has_pieces
from ...tokens.pieces import CHUNK
from ..declaration import Advance
from .calls import InPlace
from .forms.lists import PIECES, TOKENS_IN_PLACE


def advance_plan(p: Advance, target: Target) -> Plan:
    """``output``; the states of the pool are read and written in place."""
    plan, call, early = Plan(), InPlace.of(p, target), False
    output = plan.empty("output", batch, tokens, call.H, call.V, dtype=p.summand(p.v))
    if has_pieces(p):
        form = first(PIECES, call)
        early = form.plan(plan, call, output, CHUNK)
        plan.forms.append(form.name)
    last = first(TOKENS_IN_PLACE, call)
    last.plan(plan, call, output, CHUNK, early)
    plan.forms.append(last.name)
    return plan
