"""The Triton implementations. Triton itself is imported when one of them first runs."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ...problem import Problem, Step
from ..contract import Gradients, Implementation, Mode, backward_of_nothing, forward_of_nothing, nothing

SHORT = {"forward": 8, "backward": 8, "step": 16}
"""Up to this many tokens a sequence, the token-serial kernels are faster than the chunked ones. One NVIDIA H200, rwkv6, bfloat16,
(1,T,32,64): forward 11.2 against 5.5 us at T = 16 and 0.7 us a token; backward 42 against 29 us and 2 us a token."""


@cache
def interpreting() -> bool:
    """Whether this process runs Triton's kernels under its interpreter: on CPU tensors, and without the rounding of bfloat16."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


@cache
def available() -> str | None:
    """Why Triton kernels cannot run on this machine, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install 'penstock[triton]'"
    if interpreting() or torch.cuda.is_available():
        return None
    return "torch sees no GPU here (for Triton's interpreter set TRITON_INTERPRET=1 before Python starts)"


def _refuses(problem: Problem, K: int, V: int) -> str | None:
    device, sizes = problem.q.device, problem.sizes
    if device.type != "cuda" and not (device.type == "cpu" and interpreting()):
        return f"its tensors are on {device}, it works on a GPU"
    if problem.q.dtype == torch.float64:
        return "it computes in float32, and the inputs are float64"
    if interpreting() and problem.q.dtype == torch.bfloat16:
        return "Triton's interpreter cuts bfloat16 off where it should round"
    if sizes["K"] > K or sizes["V"] > V:
        return f"its states have at most K = {K} and V = {V}, these have {sizes['K']} and {sizes['V']}"
    return None


def _recurrent_refuses(problem: Problem, mode: Mode) -> str | None:
    return _refuses(problem, 512, 512)


def _chunkwise_refuses(problem: Problem, mode: Mode) -> str | None:
    return "it has no decode step" if mode == "step" else _refuses(problem, 256, 512)


def _recurrent_avoids(problem: Problem, mode: Mode) -> str | None:
    if interpreting():
        return "it runs under the interpreter"
    T = problem.sizes["T"]
    if SHORT[mode] < T and _chunkwise_refuses(problem, mode) is None:
        return f"slower than triton_chunkwise above {SHORT[mode]} tokens, these are {T}"
    return None


def _chunkwise_avoids(problem: Problem, mode: Mode) -> str | None:
    return "it runs under the interpreter" if interpreting() else None


def _operands(dtype: torch.dtype) -> int | None:
    """bfloat16 has 8 significant bits, TF32 has 11."""
    if interpreting() or (torch.version.hip and dtype != torch.bfloat16):
        return None
    if dtype == torch.bfloat16:
        return 8
    return 11 if dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest" else None


def _chunkwise_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    from . import launch

    return forward_of_nothing(problem) if nothing(problem) else launch.chunk_forward_pass(problem)[:2]


def _chunkwise_forward_keeping(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    from . import launch

    return (*forward_of_nothing(problem), None) if nothing(problem) else launch.chunk_forward_pass(problem, keep=True)


def _chunkwise_backward(
    problem: Problem, d_output: Tensor, d_final_state: Tensor | None, states: Tensor | None = None, dg: bool = True
) -> Gradients:
    from . import launch

    if nothing(problem):
        return backward_of_nothing(problem, d_final_state)
    return launch.chunk_backward_pass(problem, d_output, d_final_state, states, dg)


def _recurrent_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    from . import launch

    return forward_of_nothing(problem) if nothing(problem) else launch.recurrent_forward_pass(problem)


def _recurrent_backward(problem: Problem, d_output: Tensor, d_final_state: Tensor | None) -> Gradients:
    from . import launch

    return (
        backward_of_nothing(problem, d_final_state)
        if nothing(problem)
        else launch.recurrent_backward_pass(problem, d_output, d_final_state)
    )


def _step(step: Step) -> Tensor:
    from . import launch

    return step.v.new_zeros(step.v.shape) if nothing(step) else launch.step_pass(step)


RECURRENT = Implementation(
    name="triton_recurrent",
    summary="token-serial Triton kernels; one launch, states of a pool in place",
    available=available,
    refuses=_recurrent_refuses,
    forward=_recurrent_forward,
    backward=_recurrent_backward,
    step=_step,
    avoids=_recurrent_avoids,
)
CHUNKWISE = Implementation(
    name="triton_chunkwise",
    summary="chunkwise Triton kernels on tensor cores",
    available=available,
    refuses=_chunkwise_refuses,
    forward=_chunkwise_forward,
    backward=_chunkwise_backward,
    step=_step,
    avoids=_chunkwise_avoids,
    forward_keeping=_chunkwise_forward_keeping,
    operands=_operands,
)
