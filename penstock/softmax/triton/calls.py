"""Shared by the forms of softmax attention: a call on a GPU, its numbers, and the memory of its results."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...gpu.plan import Number, Plan, Size, Sizes
from ...gpu.target import Target
from ..declaration import Attention


@dataclass(frozen=True, eq=False)
class Call:
    """A problem on a GPU."""

    p: Attention
    target: Target
    d_output: Tensor | None = None
    """The gradient of the output, of a backward pass."""
    d_lse: Tensor | None = None

    @property
    def upstream(self) -> Tensor:
        """The gradient of the output."""
        assert self.d_output is not None
        return self.d_output


def numbers(a: Attention) -> tuple[Number, ...]:
    """Scale, window, and the numbers of sequences, queries and keys: the first numbers of every kernel."""
    window = a.window
    reach: Number = 0 if window is None else lambda s: min(window, s["Tq"] + s["Tk"])
    return a.scale, reach, lambda s: s["N"], lambda s: s["Tq"], lambda s: s["Tk"]


def _batch(s: Sizes) -> int:
    return s["B"]


def _queries(s: Sizes) -> int:
    return s["Tq"]


def _keys(s: Sizes) -> int:
    return s["Tk"]


def queries(a: Attention) -> tuple[Size, ...]:
    """The axes of a number for each query."""
    return _batch, _queries, a.sizes["H"]


def results(plan: Plan, a: Attention) -> tuple[str, str]:
    """Add the memory of the output and of the log-sum-exp."""
    return plan.empty("output", *queries(a), a.sizes["D"], dtype=a.q.dtype), plan.empty("lse", *queries(a))


def gradients(plan: Plan, a: Attention) -> tuple[str, str, str]:
    """Add the memory of dq, dk and dv."""
    keys, D, dtype = (_batch, _keys, a.sizes["G"]), a.sizes["D"], a.q.dtype
    return plan.empty("dq", *queries(a), D, dtype=dtype), plan.empty("dk", *keys, D, dtype=dtype), plan.empty("dv", *keys, D, dtype=dtype)
