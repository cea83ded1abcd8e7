"""Summaries of tokens on a GPU: sums of segments, and a scan over them of which only the last state is wanted.

The segments are those of the pass over the same tokens that would follow, so it can take the sums (``gpu/sharing.py``).
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ...errors import ImplementationRefused
from ...gpu import launch
from ...gpu.forms import first
from ...gpu.plan import Plan, strides
from ...gpu.target import Target
from ...tokens.empty import nothing
from ...tokens.gpu_calls import batch
from .. import summary
from ..declaration import Summary
from . import wide
from .calls import Backward, Call
from .forms.lists import CHUNK_BACKWARD, CHUNK_FORWARD
from .forms.sm90 import C
from .forms.states import BESIDE_HOPPER
from .plan import forward_call
from .states import Segments, Terms, after_segments
from .table_file import target


def plan(p: Summary, at: Target) -> Plan:
    """``state`` and ``decay``."""
    call, found = Call.of(p, at), Plan()
    last, decay = found.empty("state", batch, call.H, call.K, call.V), found.empty("decay", batch, call.H, call.K)
    before = None if p.initial_state is None else ("initial_state", p.initial_state.stride())
    terms = Terms("k", "v", strides(p.k, p.v), p.scale, p.reverse, before, last, p.adjoint)
    after_segments(found, call, _of_pass(p, at) or _own(call), terms, decay)
    return found


def _of_pass(p: Any, at: Target) -> Segments | None:
    """The segments of the forward pass of these tokens or, as the adjoint, of the backward pass. A summary has all that forms ask."""
    if p.sizes["K"] > wide.WIDTH:
        return None
    try:
        if p.adjoint:
            backward = Backward.of(p, at, d_output=p.v)
            return first(CHUNK_BACKWARD, backward).segments(backward)
        forward = forward_call(p, at)
        return first(CHUNK_FORWARD, forward).segments(forward)
    except ImplementationRefused:
        return None


def _own(call: Call) -> Segments:
    """Segments that fill the GPU."""
    ((_, forms),) = BESIDE_HOPPER
    form = first(forms, call)
    unit = C * form.plan.parts(call)
    L = call.segment(unit, *form.plan.programs(call), least=1)
    return Segments(form, C, L or (lambda s: max(math.ceil(s["T"] / C), 1) * unit))


def forward(p: Summary) -> tuple[Tensor, Tensor]:
    """State and decay."""
    if nothing(p):
        return summary.forward(p)
    p.sizes = {**p.sizes, "N": p.sizes["B"]}
    tensors = {"k": p.k, "v": p.v, "g": p.g, "initial_state": p.initial_state, "cu_seqlens": None}
    found = launch.run("summary", p, target, lambda at: plan(p, at), tensors)
    return found["state"], found["decay"]
