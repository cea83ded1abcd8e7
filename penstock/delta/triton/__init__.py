"""The Triton implementations. Triton itself is imported when one of them first runs."""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...call.implementation import FormVerdict, Implementation, Listed, Mode, Upstream
from ...gpu.target import interpreting, unavailable, uncompiled
from ...gpu.target import refuses as gpu_refuses
from ...tokens.empty import forward_of_nothing, gradients_of_nothing, nothing
from ...tokens.gpu_pieces import has_pieces
from ..declaration import Advance, Delta, DeltaTokens
from ..gradients import Gradients
from ..inputs import Follows, Pull, Stage, never_raw, prepared

SHORT = 16
"""Up to this many tokens, a power of two, the token-serial kernel is taken. Not measured: a chunk has the time of about 16 tokens."""
LARGEST = 2048
"""Value channels of a head, at most. Larger ones have been tested on no GPU."""


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


def _refuses(p: DeltaTokens, mode: Mode, chunkwise: bool) -> str | None:
    reason = gpu_refuses(p.q) or uncompiled(p.q)
    if reason is None and p.sizes["V"] > LARGEST:
        reason = f"its states have at most V = {LARGEST}, these have {p.sizes['V']}"
    if reason is not None or (chunkwise and mode == "advance"):
        return reason
    return _answers().refusal(_lists(chunkwise), p, mode)  # type: ignore[no-any-return]


def _lists(chunkwise: bool) -> Any:
    return _answers().CHUNKWISE if chunkwise else _answers().RECURRENT


def _groups(p: DeltaTokens, mode: Mode, d_output: Tensor | None, chunkwise: bool) -> bool:
    if gpu_refuses(p.q) is not None or nothing(p):
        return False
    return _answers().take_groups(_lists(chunkwise), p, mode, d_output)  # type: ignore[no-any-return]


def _verdicts(p: DeltaTokens, mode: Mode, chunkwise: bool) -> tuple[FormVerdict, ...]:
    return _answers().verdicts(_lists(chunkwise), p, mode)  # type: ignore[no-any-return]


def _forms(chunkwise: bool) -> tuple[Listed, ...]:
    return _answers().listed(_lists(chunkwise))  # type: ignore[no-any-return]


def _avoids(p: DeltaTokens, mode: Mode, chunkwise: bool) -> str | None:
    if interpreting():
        return "it runs under the interpreter"
    if not chunkwise and mode == "backward":
        return "its backward pass is that of triton_chunkwise"
    if not chunkwise and mode == "forward" and p.counts["T"] > SHORT:
        return f"slower than triton_chunkwise above {SHORT} tokens, these are {p.sizes['T']}"
    return None


def _operands(dtype: torch.dtype, mode: Mode) -> int | None:
    """bfloat16 has 8 significant bits, TF32 has 11."""
    if interpreting() or (torch.version.hip and dtype != torch.bfloat16):
        return None
    if dtype == torch.bfloat16:
        return 8
    return 11 if dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest" else None


def _recurrent_operands(dtype: torch.dtype, mode: Mode) -> int | None:
    """Pieces of 64 tokens, and the backward pass, are computed by chunk kernels."""
    return None if mode == "forward" else _operands(dtype, mode)


def _chunkwise_forward(p: Delta) -> tuple[Tensor, Tensor]:
    return forward_of_nothing(p) if nothing(p) else _launch().chunk_forward(p)[:2]


def _chunkwise_forward_with_residuals(p: Delta) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """The kernels of the backward pass are compiled meanwhile."""
    if nothing(p):
        return forward_of_nothing(p), ()
    output, final_state, residuals = _launch().chunk_forward(p, keep=True)
    return (output, final_state), residuals


def _recurrent_forward(p: Delta) -> tuple[Tensor, Tensor]:
    return forward_of_nothing(p) if nothing(p) else _launch().recurrent_forward(p)


def _backward(p: Delta, upstream: Upstream) -> Gradients:
    d_output, d_final_state = upstream.gradients
    assert d_output is not None
    if nothing(p):
        names = [one.name for one in p.signature.arguments if one.gradient]
        found = dict(zip(names, gradients_of_nothing(p, d_final_state)))
        return Gradients(*(found.get(name) for name in Gradients._fields))
    state_alone = [name for name, need in zip(Gradients._fields, upstream.wanted) if need] == ["initial_state"]
    return _launch().chunk_backward(p, d_output, d_final_state, state_alone, upstream.residuals)  # type: ignore[no-any-return]


def _advance(p: Advance) -> Tensor:
    return p.v.new_zeros(p.v.shape) if nothing(p) else _launch().advance(p)


def _chunkwise_raw(p: DeltaTokens, mode: Mode, d_output: Tensor | None) -> str | None:
    reason = never_raw(p, mode, d_output)
    if gpu_refuses(p.q) is not None or nothing(p):
        return reason
    return None if _answers().take_raw(_lists(True), p, mode, d_output) else reason


def _recurrent_raw(p: DeltaTokens, mode: Mode, d_output: Tensor | None) -> str | None:
    if mode == "backward":
        return "its backward pass is that of triton_chunkwise, which computes them before"
    if mode == "advance" and has_pieces(p):
        return "its pieces of 64 tokens are computed by chunk kernels, before which raw inputs are computed"
    return None


def _raw_forward(p: DeltaTokens, wide: bool, follows: Follows | None = None) -> dict[str, Tensor]:
    return _launch().raw_forward(p, wide, follows)  # type: ignore[no-any-return]


def _raw_differentiable(p: DeltaTokens, wide: bool) -> tuple[dict[str, Tensor], Pull]:
    return _launch().raw_differentiable(p, wide)  # type: ignore[no-any-return]


STAGE = Stage("penstock_delta_raw_fwd before it", _raw_forward, _raw_differentiable)
RECURRENT = prepared(
    Implementation(
        name="triton_recurrent",
        summary="token-serial Triton kernels; in place with chunkwise launches for pieces of 64 tokens",
        forward=_recurrent_forward,
        backward=_backward,
        advance=_advance,
        available=unavailable,
        refuses=partial(_refuses, chunkwise=False),
        avoids=partial(_avoids, chunkwise=False),
        operands=_recurrent_operands,
        forms=partial(_forms, False),
        verdicts=partial(_verdicts, chunkwise=False),
    ),
    groups=partial(_groups, chunkwise=False),
    raw=_recurrent_raw,
    stage=STAGE,
)
CHUNKWISE = prepared(
    Implementation(
        name="triton_chunkwise",
        summary="chunkwise Triton kernels on tensor cores",
        forward=_chunkwise_forward,
        forward_with_residuals=_chunkwise_forward_with_residuals,
        backward=_backward,
        available=unavailable,
        refuses=partial(_refuses, chunkwise=True),
        avoids=partial(_avoids, chunkwise=True),
        operands=_operands,
        forms=partial(_forms, True),
        verdicts=partial(_verdicts, chunkwise=True),
    ),
    groups=partial(_groups, chunkwise=True),
    raw=_chunkwise_raw,
    stage=STAGE,
)
