"""Softmax attention's implementations against its oracle, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels import triton
from ..softmax import FUNCTION, reference
from ..softmax.eager import IMPLEMENTATIONS
from ..softmax.problem import Attention
from .finding import Finding
from .oracle import error
from .softmax import BUDGET

SIZES = 2, 70, 130, 4, 2, 40
"""B, Tq, Tk, H, G and D: more tokens than a tile, sizes that no tile divides."""
WINDOW = 90
NAMES = "output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v"


def findings(device: str, dtype: torch.dtype) -> Iterator[Finding]:
    """Outputs, log-sum-exps and gradients of all implementations: causal, with a window, grouped heads, fewer queries than keys."""
    B, Tq, Tk, H, G, D = SIZES
    random = torch.Generator().manual_seed(0)
    q, k, v, d_output = (
        torch.randn(size, generator=random).to(device, dtype) for size in ((B, Tq, H, D), *[(B, Tk, G, D)] * 2, (B, Tq, H, D))
    )
    d_lse = torch.randn((B, Tq, H), generator=random).to(device)
    call = Attention.checked(q, k, v, None, None, True, None, WINDOW)
    exact = _results(lambda call, _: reference.exact(call), replace(call, q=q.double(), k=k.double(), v=v.double()), d_output, d_lse)
    for implementation, module in IMPLEMENTATIONS.items():
        at = implementation, device, FUNCTION, str(dtype).removeprefix("torch.")
        reason = module.refuses(call)
        if reason is not None:
            yield Finding(*at, "all", None, None, reason, absent=implementation == "triton" and triton.available() is not None)
            continue
        try:
            found = _results(module.attend, call, d_output, d_lse)
        except Exception as failure:  # whatever a kernel does on an unknown machine is a finding, and the others still run
            yield Finding(*at, "all", None, None, f"{type(failure).__name__}: {failure}", failed=True)
            continue
        for name in NAMES:
            apart = error(found[name], exact[name])
            yield Finding(*at, name, apart, BUDGET[dtype], failed=not apart <= BUDGET[dtype])


def _results(
    attend: Callable[[Attention, bool], tuple[Tensor, Tensor]], call: Attention, d_output: Tensor, d_lse: Tensor
) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    with torch.enable_grad():
        output, lse = attend(replace(call, q=leaves[0], k=leaves[1], v=leaves[2]), True)
        gradients = torch.autograd.grad((output, lse), leaves, (d_output.to(output.dtype), d_lse.to(lse.dtype)))
    return dict(zip(NAMES, (output.detach(), lse.detach(), *gradients)))
