"""Penstock: recurrent language model kernels, fast, exact and easy everywhere.

One recurrence serves linear attention, RetNet, Mamba-2, GLA, RWKV-5 and RWKV-6. See ``functional`` for the functions,
``variants`` for their table, ``errors`` for the exceptions.
"""

from . import before_torch, distributed  # noqa: F401  # before_torch first: it makes settings that torch reads when it is imported
from .call.validation import checks
from .errors import DeviceError, DtypeError, ImplementationRefused, InvalidArgument, PenstockError, RangeError, ShapeError
from .explain import explain, implementations
from .recurrence.functional import Result, advance, decode_step, gla, linear_attention, retention, rwkv5, rwkv6, simple_gla
from .recurrence.slices import Summary, summary
from .softmax import softmax_attention

__version__ = "0.1.0"

__all__ = [
    "DeviceError",
    "DtypeError",
    "ImplementationRefused",
    "InvalidArgument",
    "PenstockError",
    "RangeError",
    "Result",
    "ShapeError",
    "Summary",
    "advance",
    "checks",
    "decode_step",
    "distributed",
    "explain",
    "gla",
    "implementations",
    "linear_attention",
    "retention",
    "rwkv5",
    "rwkv6",
    "simple_gla",
    "softmax_attention",
    "summary",
]
