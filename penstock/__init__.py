"""Penstock: recurrent language model kernels, fast, exact and easy everywhere.

One recurrence serves linear attention, RetNet, Mamba-2, GLA, RWKV-5 and RWKV-6 (``recurrence``), another one DeltaNet, gated DeltaNet, KDA,
RWKV-7 and DPLR (``delta``). See ``functional`` of each for the functions, ``variants`` for their table, ``errors`` for the exceptions.
"""

from . import before_torch, distributed  # noqa: F401  # before_torch first: it makes settings that torch reads when it is imported
from .call.validation import checks
from .errors import DeviceError, DtypeError, ImplementationRefused, InvalidArgument, PenstockError, RangeError, ShapeError
from .explain import explain, implementations
from .in_place import advance, decode_step
from .recurrence.functional import gla, linear_attention, retention, rwkv5, rwkv6, simple_gla
from .softmax import softmax_attention
from .summary import summary

from .delta.functional import delta_rule, dplr, gated_delta_rule, kda, rwkv7  # isort: skip  # families are registered in this order
from .tokens.results import Result
from .tokens.summaries import MatrixSummary, Summary

__version__ = "0.1.0"

__all__ = [
    "DeviceError",
    "DtypeError",
    "ImplementationRefused",
    "InvalidArgument",
    "MatrixSummary",
    "PenstockError",
    "RangeError",
    "Result",
    "ShapeError",
    "Summary",
    "advance",
    "checks",
    "decode_step",
    "delta_rule",
    "distributed",
    "dplr",
    "explain",
    "gated_delta_rule",
    "gla",
    "implementations",
    "kda",
    "linear_attention",
    "retention",
    "rwkv5",
    "rwkv6",
    "rwkv7",
    "simple_gla",
    "softmax_attention",
    "summary",
]
