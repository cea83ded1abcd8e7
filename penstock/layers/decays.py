"""Log decays of layers, float32 whatever the dtype of the layer: one Triton kernel per chain on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..call.functions import applied
from ..call.recompute import again
from ..tokens.decays import LARGEST
from ..tokens.dtypes import state_dtype
from .activations import tanh
from .chains import Chain, ChainForm, launches, plain
from .examples import Draw, examples
from .linear import linear
from .modes import ready
from .triton import launching, refusal


class _Decay(NamedTuple):
    """The arguments of ``decay``: x [...,C], contiguous, and bias of C elements."""

    x: Tensor
    bias: Tensor


class _LowRankDecay(NamedTuple):
    """The arguments of ``low_rank_decay``."""

    hidden: Tensor
    up: Tensor
    bias: Tensor


class _LogSigmoid(NamedTuple):
    """The arguments of ``log_sigmoid``."""

    x: Tensor
    normalizer: float


def decay(x: Tensor, bias: Tensor) -> Tensor:
    """The log decay ``-exp(min(bias + x, 60))``, float32 (float64 for float64 x): x [...,C], bias of C elements."""
    return DECAY(_Decay(x.contiguous(), bias))


def _decay_by_kernel(c: _Decay) -> Tensor:
    kernel = launching("launch").Decay

    def function(*given: Tensor) -> Tensor:
        found: Tensor = applied(kernel, *given, decay_formula)
        return found

    return again(function(*c), function, *c)


def _draw_decay(draw: Draw) -> _Decay:
    C = draw.size(260, 2048)
    return _Decay(draw("x", 1, 19, C), draw("bias", 1, 1, C))


DECAY: Chain[_Decay, Tensor] = Chain(
    "decay",
    ChainForm(
        "decay", _decay_by_kernel, lambda c: refusal(*c), launches("penstock_decay_fwd", backward=("penstock_decay_bwd",)),
        examples(_draw_decay),
    ),
    plain("formula", lambda c: again(decay_formula(*c), decay_formula, *c)),
)  # fmt: skip


def low_rank_decay(hidden: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    """``decay`` of ``tanh(hidden) up``: hidden [...,M], up [M,C]."""
    return LOW_RANK_DECAY(_LowRankDecay(hidden, up, bias))


def _refuses_low_rank_decay(c: _LowRankDecay) -> str | None:
    if torch.is_grad_enabled():
        return "it computes no gradients, and gradients are on"
    if c.up.shape[0] > 128:
        return f"it takes a rank of at most 128, got {c.up.shape[0]}"
    if c.hidden.dtype != c.up.dtype:
        return f"the low-rank part is {c.hidden.dtype}, its weight {c.up.dtype}"
    return refusal(*c)


def _low_rank_decay_by_kernel(c: _LowRankDecay) -> Tensor:
    flat = c.hidden.flatten(0, -2).contiguous()
    rows, base = c.up.contiguous(), c.bias.reshape(-1).contiguous()
    found: Tensor = launching("few_rows_launch").low_rank_decay(flat, rows, base, early=ready((c.up, c.bias), (rows, base)))
    return found.view(*c.hidden.shape[:-1], c.up.shape[1])


def _low_rank_decay_in_parts(c: _LowRankDecay) -> Tensor:
    low, base = tanh(c.hidden), c.up.T
    return decay(again(linear(low, base), F.linear, low, base), c.bias)


def _draw_low_rank_decay(draw: Draw) -> _LowRankDecay:
    M, C = draw.size(40, 64), draw.size(72, 2048)
    return _LowRankDecay(draw("hidden", 1, 19, M), draw("up", M, C, scale=0.1), draw("bias", C))


LOW_RANK_DECAY: Chain[_LowRankDecay, Tensor] = Chain(
    "low_rank_decay",
    ChainForm(
        "low_rank_decay", _low_rank_decay_by_kernel, _refuses_low_rank_decay, lambda c: ("penstock_low_rank",),
        examples(_draw_low_rank_decay, gradients=False),
    ),
    plain("parts", _low_rank_decay_in_parts),
)  # fmt: skip


def decay_formula(x: Tensor, bias: Tensor) -> Tensor:
    """``decay``."""
    dtype = state_dtype(x.dtype)
    return -torch.exp((bias.to(dtype).reshape(-1) + x.to(dtype)).clamp(max=LARGEST))


def log_sigmoid(x: Tensor, normalizer: float) -> Tensor:
    """The log decay ``logsigmoid(x) / normalizer``, float32 (float64 for float64 x)."""
    return LOG_SIGMOID(_LogSigmoid(x.contiguous(), float(normalizer)))


def _log_sigmoid_by_kernel(c: _LogSigmoid) -> Tensor:
    kernel, normalizer, formula = launching("launch").LogSigmoid, c.normalizer, _log_sigmoid_formula_of(c)

    def function(x: Tensor) -> Tensor:
        found: Tensor = applied(kernel, x, normalizer, formula)
        return found

    return again(function(c.x), function, c.x)


def _log_sigmoid_formula_of(c: _LogSigmoid) -> Any:
    return partial(log_sigmoid_formula, normalizer=c.normalizer)


def _log_sigmoid_by_formula(c: _LogSigmoid) -> Tensor:
    formula = _log_sigmoid_formula_of(c)
    found: Tensor = formula(c.x)
    return again(found, formula, c.x)


LOG_SIGMOID: Chain[_LogSigmoid, Tensor] = Chain(
    "log_sigmoid",
    ChainForm(
        "log_sigmoid", _log_sigmoid_by_kernel, lambda c: refusal(c.x),
        launches("penstock_log_sigmoid_fwd", backward=("penstock_log_sigmoid_bwd",)),
        examples(lambda draw: _LogSigmoid(draw("x", 3, draw.size(700, 1024), scale=4), 16.0)),
    ),
    plain("formula", _log_sigmoid_by_formula),
)  # fmt: skip


def log_sigmoid_formula(x: Tensor, *, normalizer: float) -> Tensor:
    """``log_sigmoid``."""
    return F.logsigmoid(x.to(state_dtype(x.dtype))) / normalizer
