"""Summaries of tokens on a GPU: the launches for states between segments, of which only the last state is wanted."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...gpu import forms, launch
from ...gpu.plan import Plan, strides
from ...gpu.target import Target
from ...tokens.empty import nothing
from .. import summary
from ..declaration import Summary
from .calls import Call, batch
from .forms import sm90, states
from .states import Terms, before_segments
from .table_file import target

LN2 = math.log(2)
((_, STATES),) = states.BESIDE_HOPPER


def plan(p: Summary, at: Target) -> Plan:
    """``state`` and, of each segment, its log2 decay."""
    call, found = Call.of(p, at), Plan()
    form = forms.first(STATES, call)
    C = sm90.C
    last = found.empty("state", batch, call.H, call.K, call.V)
    first = None if p.initial_state is None else ("initial_state", p.initial_state.stride())
    terms = Terms("k", "v", strides(p.k, p.v), p.scale, p.reverse, first, last, p.adjoint)
    segment = call.segment(C * form.plan.parts(call), *form.plan.programs(call), least=1)
    before_segments(found, call, form, terms, C, segment or (lambda s: max(math.ceil(s["T"] / C), 1) * C * form.plan.parts(call)))
    return found


def forward(p: Summary) -> tuple[Tensor, Tensor]:
    """State and decay."""
    if nothing(p):
        return summary.forward(p)
    B, H, K, _ = p.state_shape
    p.sizes = {**p.sizes, "N": B}
    tensors = {"k": p.k, "v": p.v, "g": p.g, "initial_state": p.initial_state, "cu_seqlens": None}
    found = launch.run("summary", p, target, lambda at: plan(p, at), tensors)
    decays = found.get("d_segment_decays" if p.adjoint else "segment_decays")
    decay = p.k.new_zeros(B, H, K, dtype=torch.float32) if decays is None else decays.view(B, -1, H, K).sum(1) * LN2
    return found["state"], decay
