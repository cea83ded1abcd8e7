"""The ordered lists of forms of softmax attention. A pass is planned by the first form that neither refuses nor avoids the call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...call.implementation import Example, FormVerdict, Listed, Mode
from ...gpu import forms
from ...gpu.forms import Form, Part
from ...gpu.hopper import absent
from ...gpu.plan import Plan
from ...gpu.target import Target
from ..declaration import FUNCTION, Attention
from .calls import Call
from .portable import forms as portable
from .sm90 import forms as sm90

AttentionForm = Form[Call, Callable[[Call], Plan]]


def _examples(*sizes: int, dtypes: tuple[torch.dtype, ...]) -> tuple[Example, ...]:
    given = {"B": 1, "N": 1, "Tq": 70, "Tk": 130, "H": 4, "G": 2}
    return tuple(Example(FUNCTION, dtype, given | {"D": D}) for D in sizes for dtype in dtypes)


HALF, EVERY = (torch.bfloat16, torch.float16), (torch.float16, torch.float32)
FORWARD: tuple[AttentionForm, ...] = (
    Form("attention_fwd_sm90", sm90.forward, absent, sm90.refuses_forward, examples=_examples(64, 128, 256, dtypes=HALF)),
    Form("attention_fwd", portable.forward, examples=_examples(40, dtypes=EVERY)),
)
BACKWARD: tuple[AttentionForm, ...] = (
    Form("attention_bwd_sm90", sm90.backward, absent, sm90.refuses_backward, examples=_examples(64, 128, dtypes=HALF)),
    Form("attention_bwd", portable.backward, examples=_examples(40, dtypes=EVERY)),
)
PARTS: dict[Mode, tuple[Part, ...]] = {"forward": (("forward", FORWARD),), "backward": (("backward", BACKWARD),)}


def forward_plan(a: Attention, target: Target) -> Plan:
    """``output`` and ``lse``."""
    return forms.planned(FORWARD, Call(a, target))


def backward_plan(a: Attention, d_output: Tensor, d_lse: Tensor | None, target: Target) -> Plan:
    """``dq``, ``dk`` and ``dv`` from what the forward pass returned and its gradients."""
    return forms.planned(BACKWARD, Call(a, target, d_output, d_lse))


def verdicts(a: Attention, mode: Mode) -> tuple[FormVerdict, ...]:
    """The answers of the forms of a mode, up to the one that runs. Nothing runs without queries, or backward without keys."""
    if not a.q.numel() or (mode == "backward" and not a.k.numel()):
        return ()
    call = Call(a, Target.of(a.q.device))
    return tuple(found for part, among in PARTS[mode] for found in forms.verdicts(part, among, call, ()))


def listed() -> tuple[Listed, ...]:
    """All forms."""
    return forms.listed(PARTS, Target.of)
