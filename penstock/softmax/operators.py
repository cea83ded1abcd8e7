"""The operator of softmax attention and its implementations, in the order in which ``impl="auto"`` asks them."""

from __future__ import annotations

from ..call.dispatch import Family
from ..call.operator import Operator
from . import reference, sdpa, triton
from .declaration import OPTIONS, RESULTS, SIGNATURE, Attention

FAMILY = Family(triton.IMPLEMENTATION, sdpa.IMPLEMENTATION, reference.IMPLEMENTATION)
ATTENTION = Operator("softmax_attention", Attention, [SIGNATURE], RESULTS, FAMILY, OPTIONS, sdpa.differentiable)
