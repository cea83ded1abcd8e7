"""The CUDA implementation: RWKV-5 and RWKV-6 token by token. The first call imports cuda-core and compiles with NVRTC."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ...call.implementation import Implementation, Mode, Upstream
from ...gpu.nvrtc import available
from ...gpu.target import Target, unavailable
from ...tokens.empty import forward_of_nothing, gradients_of_nothing, nothing
from ..declaration import Advance, Recurrence, Tokens, refuses_bonus
from ..gradients import Gradients
from .sizes import COLUMNS, FAR, HEADS

CAPABILITY = (8, 0)
"""The first GPUs with bfloat16."""
LENGTHS = (8, 256)
"""Lower (exclusive) and upper bound of T, powers of two. Between them it is faster than the Triton kernels if all thread blocks run at
once (benchmarks/NOTES.md, "CUDA kernels")."""


@cache
def _launch() -> ModuleType:
    """The module that launches, imported when it is first needed."""
    from . import launch

    return launch


def _refuses(problem: Tokens, mode: Mode) -> str | None:
    device, sizes, variant = problem.q.device, problem.sizes, problem.variant
    K, V = sizes["K"], sizes["V"]
    if (why := refuses_bonus(problem, mode)) is not None:
        return why
    if not variant.bonus or variant.decay not in ("HK", "BTHK"):
        return f"it computes rwkv5 and rwkv6, this is {variant.name}"
    if problem.q.dtype == torch.float64:
        return "it computes in float32, and the inputs are float64"
    if K != V or K not in HEADS:
        return f"its heads have K = V of {', '.join(map(str, HEADS[:-1]))} or {HEADS[-1]}, these have K = {K} and V = {V}"
    farthest = max(abs(x.stride(1)) for x in (problem.q, problem.k, problem.v, problem.gate) if x is not None)
    if sizes["T"] >= FAR // 2 or farthest * max(sizes["H"], 1) >= FAR:
        return f"it takes less than 2^30 tokens less than 2^31 elements apart, these are {sizes['T']} tokens {farthest} elements apart"
    if device.type != "cuda":
        return f"its tensors are on {device}, it works on an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"it needs a GPU of compute capability 8.0, this one has {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"
    return None


def _avoids(problem: Tokens, mode: Mode) -> str | None:
    if unavailable() is not None:
        return None
    if mode != "forward":
        return "the Triton kernels are faster backward and in place"
    counts, (low, high) = problem.counts, LENGTHS
    if not low < counts["T"] <= high:
        return f"faster than the Triton kernels from {low + 1} to {high} tokens, these are {problem.sizes['T']}"
    blocks, at_once = counts["N"] * problem.sizes["H"] * problem.sizes["V"] // COLUMNS, Target.of(problem.q.device).multiprocessors
    if blocks > at_once:
        return f"faster than the Triton kernels where each block of threads has a multiprocessor, these are {blocks} for {at_once}"
    return None


def _forward(problem: Recurrence) -> tuple[Tensor, Tensor]:
    return forward_of_nothing(problem) if nothing(problem) else _launch().forward_pass(problem)


def _backward(problem: Recurrence, upstream: Upstream) -> Gradients:
    d_output, d_final_state = upstream.gradients
    assert d_output is not None
    if nothing(problem):
        return Gradients(*gradients_of_nothing(problem, d_final_state))
    return _launch().backward_pass(problem, d_output, d_final_state)  # type: ignore[no-any-return]


def _advance(problem: Advance) -> Tensor:
    return problem.v.new_zeros(problem.v.shape) if nothing(problem) else _launch().advance_pass(problem)


IMPLEMENTATION = Implementation(
    name="cuda",
    summary="token-serial CUDA C++ kernels of RWKV-5 and RWKV-6, compiled when first used",
    available=available,
    refuses=_refuses,
    forward=_forward,
    backward=_backward,
    advance=_advance,
    avoids=_avoids,
)
