"""Softmax attention beside every backend of torch's operator that takes the call, the fastest of them as the baseline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import Complaints, RangeError
from ..softmax import FUNCTION, softmax_attention
from ..softmax.operators import ATTENTION
from ..softmax.reference import exact
from ..verify.oracle import error
from . import clock
from .candidates import Mode
from .cases import Case
from .exact import Apart, WrongResult
from .measure import Measurement, Right, Untimed, reason_of, timed_in_turn

BACKENDS = {
    "sdpa (cudnn)": SDPBackend.CUDNN_ATTENTION,
    "sdpa (flash)": SDPBackend.FLASH_ATTENTION,
    "sdpa (efficient)": SDPBackend.EFFICIENT_ATTENTION,
}
"""Of torch's operator on a GPU. On a CPU torch chooses."""
BUDGET = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-11}
"""Allowed error by dtype; the errors themselves stand in the table, for all candidates."""
HEADS, TOKENS = 2, 4096
"""How much the oracle is asked about: so many heads of the first sequence, and their first tokens, which later ones must not change."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def moved_bytes(case: Case, mode: Mode, size: int) -> int:
    """q, k, v and the output once; with a backward pass these and their gradients once more, and the output's gradient."""
    B, T, H, D, _ = case.shape
    return (4 if mode == "fwd" else 4 + 8) * B * T * H * D * size


def torchs(device: torch.device) -> dict[str, Attend]:
    """Torch's operator by name of the backend; takes [B,T,H,D]."""

    def backend(kind: SDPBackend | None) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(kind) if kind is not None else nullcontext():
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        return attend

    return {name: backend(kind) for name, kind in BACKENDS.items()} if clock.on_gpu(device) else {"sdpa": backend(None)}


def measure(case: Case, mode: Mode, dtype: torch.dtype, device: str, seconds: float, impl: str = "auto", seed: int = 0) -> Measurement:
    """Check every candidate, then time them in turn. The first named is the fastest of torch's."""
    if mode == "decode":
        complaints = Complaints("bench")
        complaints.add(RangeError, "mode", f"fwd or fwdbwd for {FUNCTION}", repr(mode))
        complaints.raise_any()
    B, T, H, D, _ = case.shape
    at = torch.device(device)
    random = torch.Generator(at).manual_seed(seed)
    q, k, v, d_output = (torch.randn(B, T, H, D, generator=random, device=at).to(dtype) for _ in range(4))
    tokens, heads = min(T, TOKENS), min(H, HEADS)
    upstream = torch.cat([d_output[:, :tokens], torch.zeros_like(d_output[:, tokens:])], 1)
    wanted = _exact(q, k, v, upstream, tokens, heads, mode)
    right: list[Right] = []
    untimed: list[Untimed] = []
    with clock.current(at):
        peers, own = torchs(at), f"penstock ({impl})"
        for name, attend in (peers | {own: lambda q, k, v: softmax_attention(q, k, v, impl=impl)}).items():
            ours = name == own
            try:
                first_call, found = clock.seconds_of(_call(attend, (q, k, v), upstream, mode), at)
                results = {
                    what: Apart(error(x.detach()[:1, :tokens, :heads], wanted[what]), BUDGET[dtype]) for what, x in zip(wanted, found)
                }
                for what, apart in results.items():
                    if not apart.error <= apart.allowed:
                        told = f"its {what} is {apart.error:.2g} from the float64 formula, {apart.allowed:.2g} is allowed"
                        raise WrongResult(f"{name} is wrong and was not timed: {FUNCTION} at {case.shape.text}, {mode}", told)
                right.append(Right(name, None, results, first_call, _call(attend, (q, k, v), d_output, mode)))
            except Exception as failure:
                untimed.append(Untimed(name, reason_of(failure, ours), ours))
        source = torch.zeros(moved_bytes(case, mode, dtype.itemsize) // 2, dtype=torch.uint8, device=at)
        target = torch.ones_like(source)
        copy, timings = timed_in_turn(lambda: target.copy_(source), right, at, seconds)
    fastest = min((one for one in timings if one.candidate in peers), key=lambda one: one.milliseconds, default=None)
    timings = tuple(sorted(timings, key=lambda one: one is not fastest))
    first = None if fastest is None else fastest.candidate
    told = str(dtype).removeprefix("torch.")
    moved = moved_bytes(case, mode, dtype.itemsize)
    return Measurement(FUNCTION, case.name, case.shape, mode, told, device, tokens, moved, copy, timings, tuple(untimed), first)


def _call(attend: Attend, inputs: tuple[Tensor, ...], upstream: Tensor, mode: Mode) -> Callable[[], tuple[Tensor, ...]]:
    """The output, then with a backward pass the gradients, of leaves of its own: those of another stream cannot be captured."""

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attend(*inputs),)

    def both() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = attend(*leaves)
        return output, *torch.autograd.grad(output, leaves, upstream)

    return forward if mode == "fwd" else both


def _exact(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, tokens: int, heads: int, mode: Mode) -> dict[str, Tensor]:
    """What is right for the checked heads and tokens, one head after another: the oracle has all scores in memory."""
    parts = []
    for h in range(heads):
        leaves = [x.detach()[:1, :tokens, h : h + 1].double().requires_grad_(mode == "fwdbwd") for x in (q, k, v)]
        output, _ = exact(ATTENTION.checked(FUNCTION, (*leaves, None, None), (True, None, None, False)))
        gradients = torch.autograd.grad(output, leaves, upstream[:1, :tokens, h : h + 1].double()) if mode == "fwdbwd" else ()
        parts.append((output.detach(), *gradients))
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    return {name: torch.cat(found, 2) for name, found in zip(names, zip(*parts))}
