"""Softmax attention beside torch's ``scaled_dot_product_attention``. The fastest of its backends is the baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..call.families import functions
from ..errors import Complaints, RangeError, ShapeError
from ..tokens.shape import Shape
from ..verify.oracle import error
from . import clock
from .candidates import IMPLEMENTATION_MODES, Mode
from .cases import Case
from .exact import Deviation, WrongResult
from .measure import Checked, Measurement, Untimed, reason_of, timed_in_turn

FUNCTION = "softmax_attention"
"""The function that is measured."""
KNOWN = functions()[FUNCTION]
TRIAL = KNOWN.trials[0]
softmax_attention: Any = KNOWN.functions[FUNCTION]
BACKENDS = {
    "sdpa (cudnn)": SDPBackend.CUDNN_ATTENTION,
    "sdpa (flash)": SDPBackend.FLASH_ATTENTION,
    "sdpa (efficient)": SDPBackend.EFFICIENT_ATTENTION,
}
"""Backends of torch's operator on a GPU. On a CPU torch chooses."""
HEADS, TOKENS = 2, 4096
"""The results of this many heads of the first sequence, and of their first tokens, are compared with the oracle."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def check_case(mode: Mode, shape: Shape | None = None) -> None:
    """Raise RangeError or ShapeError unless softmax attention has this mode and shape."""
    complaints = Complaints("bench")
    if mode == "decode":
        complaints.add(RangeError, "mode", f"fwd or fwdbwd for {FUNCTION}", repr(mode))
    if shape is not None and shape.K != shape.V:
        complaints.add(ShapeError, "shape", f"one of equal K and V for {FUNCTION}", shape.text, "Leave V out.")
    complaints.raise_any()


def moved_bytes(case: Case, mode: Mode, size: int) -> int:
    """Count the bytes of q, k, v and the output; with a backward pass, also of these again, the gradients and the output's gradient."""
    B, T, H, D, _ = case.shape
    return (4 if mode == "fwd" else 4 + 8) * B * T * H * D * size


def sdpa_backends(device: torch.device) -> dict[str, Attend]:
    """Torch's operator by name of the backend, as functions of [B,T,H,D]."""

    def attend(kind: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(kind) if kind is not None else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    if not clock.on_gpu(device):
        return {"sdpa": partial(attend, None)}
    return {name: partial(attend, kind) for name, kind in BACKENDS.items()}


def measure(
    case: Case,
    mode: Mode,
    dtype: torch.dtype,
    device: str,
    seconds: float,
    impls: Sequence[str] = ("auto",),
    peers: Sequence[str] = ("sdpa",),
    seed: int = 0,
) -> Measurement:
    """Check every candidate, then time them in turn. The fastest backend of "sdpa" is the baseline; without it, the first of ``impls``.

    Raises ImplementationRefused if a named implementation refuses the call.
    """
    check_case(mode, case.shape)
    B, T, H, D, _ = case.shape
    place = torch.device(device)
    random = torch.Generator(place).manual_seed(seed)
    q, k, v, d_output = (torch.randn(B, T, H, D, generator=random, device=place).to(dtype) for _ in range(4))
    problem = TRIAL.operator.checked(FUNCTION, (q, k, v, None, None), (True, None, None, False))
    for impl in impls:
        for run_mode in IMPLEMENTATION_MODES[mode]:
            KNOWN.family.choose(problem, run_mode, impl, gradients=mode == "fwdbwd")
    backends = sdpa_backends(place) if "sdpa" in peers else {}
    own: dict[str, Attend] = {f"penstock ({impl})": partial(softmax_attention, impl=impl) for impl in impls}
    moved = moved_bytes(case, mode, dtype.itemsize)
    with clock.current(place):
        right, untimed = _checked(backends | own, own, (q, k, v), d_output, case.shape, mode)
        source = torch.zeros(moved // 2, dtype=torch.uint8, device=place)
        target = torch.ones_like(source)
        copy, timings = timed_in_turn(lambda: target.copy_(source), right, place, seconds)
    baseline = min((one for one in timings if one.candidate in backends), key=lambda one: one.milliseconds, default=None)
    timings = tuple(sorted(timings, key=lambda one: one is not baseline))
    first = next(iter(own), None) if not backends else None if baseline is None else baseline.candidate
    name = str(dtype).removeprefix("torch.")
    return Measurement(FUNCTION, case.name, case.shape, mode, name, device, min(T, TOKENS), moved, copy, timings, tuple(untimed), first)


def _checked(
    candidates: Mapping[str, Attend], own: Mapping[str, Attend], inputs: tuple[Tensor, ...], d_output: Tensor, shape: Shape, mode: Mode
) -> tuple[list[Checked], list[Untimed]]:
    """Compare every candidate with the oracle; candidates that fail or are wrong are not timed."""
    tokens, heads, dtype = min(shape.T, TOKENS), min(shape.H, HEADS), d_output.dtype
    upstream = torch.cat([d_output[:, :tokens], torch.zeros_like(d_output[:, tokens:])], 1)
    budget = TRIAL.budget or {}
    expected = _exact(inputs, upstream, tokens, heads, mode)
    right: list[Checked] = []
    untimed: list[Untimed] = []
    for name, attend in candidates.items():
        try:
            first_call, found = clock.seconds_of(_call(attend, inputs, upstream, mode), d_output.device)
            results = {
                result: Deviation(error(x.detach()[:1, :tokens, :heads], expected[result]), budget[dtype])
                for result, x in zip(expected, found)
            }
            for result, one in results.items():
                if not one.error <= one.allowed:
                    detail = f"its {result} is {one.error:.2g} from the float64 formula, {one.allowed:.2g} is allowed"
                    raise WrongResult(f"{name} is wrong and was not timed: {FUNCTION} at {shape.text}, {mode}", detail)
            right.append(Checked(name, None, results, first_call, _call(attend, inputs, d_output, mode)))
        except Exception as failure:
            untimed.append(Untimed(name, reason_of(failure, name in own), name in own))
    return right, untimed


def _call(attend: Attend, inputs: tuple[Tensor, ...], upstream: Tensor, mode: Mode) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call that computes the output and, with a backward pass, the gradients.

    Every call makes its own leaves: a CUDA graph cannot capture the gradients of leaves of another stream.
    """

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attend(*inputs),)

    def both() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = attend(*leaves)
        return output, *torch.autograd.grad(output, leaves, upstream)

    return forward if mode == "fwd" else both


def _exact(inputs: tuple[Tensor, ...], upstream: Tensor, tokens: int, heads: int, mode: Mode) -> dict[str, Tensor]:
    """The exact results for the checked heads and tokens. Heads are computed one by one: the oracle stores all scores of a head."""
    parts = []
    for h in range(heads):
        leaves = [x.detach()[:1, :tokens, h : h + 1].double().requires_grad_(mode == "fwdbwd") for x in inputs]
        problem = TRIAL.operator.checked(FUNCTION, (*leaves, None, None), (True, None, None, False))
        output = KNOWN.family.named("reference").forward(problem)[0]
        assert output is not None
        gradients = torch.autograd.grad(output, leaves, upstream[:1, :tokens, h : h + 1].double()) if mode == "fwdbwd" else ()
        parts.append((output.detach(), *gradients))
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    return {name: torch.cat(found, 2) for name, found in zip(names, zip(*parts))}
