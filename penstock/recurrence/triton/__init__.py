"""The Triton implementations. Triton itself is imported when one of them first runs."""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...call.derivatives import Tensors, gradients_of
from ...call.implementation import FormVerdict, Implementation, Listed, Mode, Upstream
from ...gpu.target import interpreting, unavailable
from ...gpu.target import refuses as gpu_refuses
from ...tokens.empty import forward_of_nothing, gradients_of_nothing, nothing
from .. import summary
from ..declaration import Advance, Recurrence, Summary, Tokens, refuses_bonus
from ..gradients import Gradients

SHORT = {"forward": 8, "backward": 8, "advance": 16}
"""Up to this many tokens, a power of two, the token-serial kernels are faster than the chunked ones. One NVIDIA H200, rwkv6, bfloat16,
(1,T,32,64): forward 11.2 against 5.5 us at T = 16 and 0.7 us a token; backward 42 against 29 us and 2 us a token."""
LARGEST = 2048
"""Channels of a head, at most. Larger ones have been tested on no GPU."""


@cache
def _launch() -> ModuleType:
    """The module that launches, imported when it is first needed."""
    from . import launch

    return launch


@cache
def _answers() -> ModuleType:
    """The module that asks forms, imported when it is first needed."""
    from . import answers

    return answers


def _refuses(p: Tokens, mode: Mode, chunkwise: bool) -> str | None:
    reason = refuses_bonus(p, mode) or gpu_refuses(p.q) or _too_large(p)
    if reason is not None or (chunkwise and mode == "advance"):
        return reason
    return _answers().refusal(_lists(chunkwise), p, mode)  # type: ignore[no-any-return]


def _too_large(p: Tokens) -> str | None:
    K, V = p.sizes["K"], p.sizes["V"]
    return f"its states have at most K = {LARGEST} and V = {LARGEST}, these have {K} and {V}" if max(K, V) > LARGEST else None


def _lists(chunkwise: bool) -> Any:
    return _answers().CHUNKWISE if chunkwise else _answers().RECURRENT


def _verdicts(p: Tokens, mode: Mode, chunkwise: bool) -> tuple[FormVerdict, ...]:
    return _answers().verdicts(_lists(chunkwise), p, mode)  # type: ignore[no-any-return]


def _forms(chunkwise: bool) -> tuple[Listed, ...]:
    return _answers().listed(_lists(chunkwise))  # type: ignore[no-any-return]


def _recurrent_avoids(p: Tokens, mode: Mode) -> str | None:
    if interpreting():
        return "it runs under the interpreter"
    T = p.counts["T"]
    if mode != "advance" and SHORT[mode] < T:
        return f"slower than triton_chunkwise above {SHORT[mode]} tokens, these are {p.sizes['T']}"
    return None


def _chunkwise_avoids(p: Tokens, mode: Mode) -> str | None:
    return "it runs under the interpreter" if interpreting() else None


def _operands(dtype: torch.dtype, mode: Mode) -> int | None:
    """bfloat16 has 8 significant bits, TF32 has 11."""
    if interpreting() or (torch.version.hip and dtype != torch.bfloat16):
        return None
    if dtype == torch.bfloat16:
        return 8
    return 11 if dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest" else None


def _chunkwise_forward(p: Recurrence) -> tuple[Tensor, Tensor]:
    return forward_of_nothing(p) if nothing(p) else _launch().chunk_forward(p)[:2]


def _chunkwise_forward_with_residuals(p: Recurrence) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, ...]]:
    if nothing(p):
        return forward_of_nothing(p), ()
    output, final_state, residuals = _launch().chunk_forward(p, keep=True)
    return (output, final_state), residuals


def _chunkwise_backward(p: Recurrence, upstream: Upstream) -> Gradients:
    d_output, d_final_state = upstream.gradients
    if nothing(p):
        return Gradients(*gradients_of_nothing(p, d_final_state))
    assert d_output is not None
    dg = not upstream.wanted or upstream.wanted[3]
    found: Gradients = _launch().chunk_backward(p, d_output, d_final_state, upstream.residuals, dg)
    return found


def _recurrent_forward(p: Recurrence) -> tuple[Tensor, Tensor]:
    return forward_of_nothing(p) if nothing(p) else _launch().recurrent_forward(p)[:2]


def _recurrent_backward(p: Recurrence, upstream: Upstream) -> Gradients:
    d_output, d_final_state = upstream.gradients
    assert d_output is not None
    return Gradients(*gradients_of_nothing(p, d_final_state)) if nothing(p) else _launch().recurrent_backward(p, d_output, d_final_state)


def _advance(p: Advance) -> Tensor:
    return p.v.new_zeros(p.v.shape) if nothing(p) else _launch().advance(p)


def _recurrent_operands(dtype: torch.dtype, mode: Mode) -> int | None:
    """In place, pieces of 64 tokens are computed by a chunk kernel."""
    return _operands(dtype, mode) if mode == "advance" else None


def _summary_forward(p: Summary) -> tuple[Tensor, Tensor]:
    if nothing(p):
        return summary.forward(p)
    from .summaries import forward

    return forward(p)


def _summary_backward(p: Summary, upstream: Upstream) -> Tensors:
    """By autograd through the formula in plain PyTorch."""
    return gradients_of(summary.forward, p, upstream.gradients)


def _summary_refuses(p: Summary, mode: Mode) -> str | None:
    if mode == "forward" and not p.adjoint and p.scale != 1:
        return f"only the adjoint has a scale, this is {p.scale}"
    return gpu_refuses(p.k) or _too_large(p)


def _summary_forms() -> tuple[Listed, ...]:
    return _answers().listed(_answers().SUMMARY)  # type: ignore[no-any-return]


def _summary_verdicts(p: Summary, mode: Mode) -> tuple[FormVerdict, ...]:
    return _answers().verdicts_of_summary(p) if mode == "forward" else ()


def _summary_operands(dtype: torch.dtype, mode: Mode) -> int | None:
    return None if mode == "backward" else _operands(dtype, mode)


RECURRENT = Implementation(
    name="triton_recurrent",
    summary="token-serial Triton kernels; in place with a chunkwise launch for pieces of 64 tokens",
    forward=_recurrent_forward,
    backward=_recurrent_backward,
    advance=_advance,
    available=unavailable,
    refuses=partial(_refuses, chunkwise=False),
    avoids=_recurrent_avoids,
    operands=_recurrent_operands,
    forms=partial(_forms, False),
    verdicts=partial(_verdicts, chunkwise=False),
)
CHUNKWISE = Implementation(
    name="triton_chunkwise",
    summary="chunkwise Triton kernels on tensor cores",
    forward=_chunkwise_forward,
    backward=_chunkwise_backward,
    forward_with_residuals=_chunkwise_forward_with_residuals,
    available=unavailable,
    refuses=partial(_refuses, chunkwise=True),
    avoids=_chunkwise_avoids,
    operands=_operands,
    forms=partial(_forms, True),
    verdicts=partial(_verdicts, chunkwise=True),
)
SUMMARY = Implementation(
    name="triton",
    summary="sums of segments on tensor cores, and a scan over them",
    forward=_summary_forward,
    backward=_summary_backward,
    available=unavailable,
    refuses=_summary_refuses,
    avoids=_chunkwise_avoids,
    operands=_summary_operands,
    forms=_summary_forms,
    verdicts=_summary_verdicts,
)
