"""Softmax attention by Triton kernels. Triton itself is imported when they first run."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ...call.implementation import FormVerdict, Implementation, Listed, Mode, Upstream
from ...gpu.target import interpreting, unavailable, uncompiled
from ...gpu.target import refuses as gpu_refuses
from ..declaration import Attention

LARGEST = 256
"""Elements of a head."""


@cache
def _launch() -> ModuleType:
    """The module that launches, imported when it is first needed."""
    from . import launch

    return launch


@cache
def over_pages() -> ModuleType:
    """The module that launches the kernels for pages, likewise."""
    from . import pages

    return pages


def _refuses(a: Attention, mode: Mode) -> str | None:
    too_large = f"heads have at most {LARGEST} elements, these have {a.sizes['D']}" if a.sizes["D"] > LARGEST else None
    return gpu_refuses(a.q) or uncompiled(a.q) or too_large


def _verdicts(a: Attention, mode: Mode) -> tuple[FormVerdict, ...]:
    return _launch().plan.verdicts(a, mode)  # type: ignore[no-any-return]


def _forms() -> tuple[Listed, ...]:
    return _launch().plan.listed()  # type: ignore[no-any-return]


def _avoids(a: Attention, mode: Mode) -> str | None:
    return "it runs under the interpreter" if interpreting() else None


def _forward(a: Attention) -> tuple[Tensor, Tensor]:
    if not a.q.numel():
        return torch.zeros_like(a.q), a.q.new_zeros(a.q.shape[:3], dtype=torch.float32)
    output, lse = _launch().forward(a)
    return output, lse


def _backward(a: Attention, upstream: Upstream) -> tuple[Tensor, Tensor, Tensor]:
    if not a.q.numel() or not a.k.numel():
        return torch.zeros_like(a.q), torch.zeros_like(a.k), torch.zeros_like(a.v)
    (d_output, d_lse), (output, lse) = upstream.gradients, upstream.results
    assert d_output is not None
    dq, dk, dv = _launch().backward(a, d_output, d_lse, output, lse)
    return dq, dk, dv


IMPLEMENTATION = Implementation(
    name="triton",
    summary="FlashAttention kernels in Triton, on Hopper in Gluon",
    forward=_forward,
    backward=_backward,
    available=unavailable,
    refuses=_refuses,
    avoids=_avoids,
    forms=_forms,
    verdicts=_verdicts,
)
