"""What forms of GPU kernels ask about a call over tokens, in every family: sizes, and grids and memory that follow from them.

Kernels and constants depend on ``Problem.counts``. Grids, numbers and shapes are functions of the exact sizes, so calls with equal counts
share a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..gpu.hopper import other_rows
from ..gpu.plan import Size, Sizes, chunks
from ..gpu.target import Target
from .problem import TokenProblem


@dataclass(frozen=True, eq=False)
class TokenCall:
    """A problem on a GPU, with the sizes that all its launches share."""

    p: Any
    target: Target
    B: int
    """B, T and N are rounded up to powers of two; only choices depend on them."""
    T: int
    N: int
    H: int
    K: int
    V: int
    packed: bool
    precision: str
    """Of products, see ``gpu.target.precision``."""

    def config(self, kernel: str) -> Any:
        """Block sizes of a launch: the ``KernelConfig`` of the family."""
        raise NotImplementedError

    @property
    def cuda(self) -> bool:
        """Whether kernels are compiled for a GPU of NVIDIA."""
        return self.target.nvidia

    def chunks(self, L: Size) -> Callable[[Sizes], int]:
        """An upper bound of the number of chunks (or segments) of L tokens in all sequences."""
        return lambda s: chunks(s["T"], L(s) if callable(L) else L, s["N"], self.packed)

    def programs(self, count: Size, each: int) -> Callable[[Sizes], int]:
        """A grid: ``each`` programs for every head of each of ``count`` sequences, segments or chunks."""
        return lambda s: (count(s) if callable(count) else count) * self.H * each

    def other_rows(self, C: int, each: int) -> str | None:
        """Why kernels for Hopper cannot copy the matrices of this call in tiles, or None.

        They are [B * T,...] and [chunks * H * each,...], of chunks of C tokens. Sizes are rounded up: calls that share a plan have equal
        answers.
        """
        return other_rows(self.B * self.T, chunks(self.T, C, self.N, self.packed) * self.H * each)

    def step_config(self) -> Any:
        """The configuration of an update in place. BV is halved, down to 16, until each multiprocessor has ``programs_per_sm`` programs."""
        b = self.config("step")
        while b.BV > 16 and self.N * self.H * math.ceil(self.V / b.BV) < b.programs_per_sm * self.target.multiprocessors:
            b = b._replace(BV=b.BV // 2, warps=max(b.warps // 2, 1))
        return b

    def with_piece(self, piece: int) -> Callable[[Sizes], int]:
        """The most sequences with a piece of ``piece`` tokens."""
        return lambda s: min(s["N"], s["T"] // piece) if self.packed else s["N"] * (s["T"] >= piece)

    def segment(self, C: int, each: int, programs_per_sm: int, least: int = 2) -> Callable[[Sizes], int] | None:
        """Tokens in a segment, a multiple of C, for ``programs_per_sm`` programs on each multiprocessor; None: no segments.

        ``each``: the number of programs for a head of a sequence. ``least``: fewer segments of a sequence are not worth their launches.
        """
        target = programs_per_sm * self.target.multiprocessors
        if least * self.N * self.H * each > target:
            return None

        def tokens(s: Sizes) -> int:
            programs = max(s["N"] * self.H * each, 1)
            total = s["T"] * s["B"] if self.packed else s["T"]
            wanted = math.ceil(target * s["N"] / programs) if self.packed else target // programs
            segments = min(wanted, max(total // (4 * C), 1))
            return max(math.ceil(total / segments / C), 1) * C

        return tokens if tokens({"B": self.B, "T": self.T, "N": self.N}) < self.T else None


def plan_name(name: str, p: TokenProblem) -> str:
    """The name of a pass's plan: blocks of key channels, and heads that share q and k, have plans of their own."""
    if p.partial:
        return name + " of a block"
    return f"{name} of {p.groups} groups" if p.groups else name


def tokens(s: Sizes) -> int:
    """T, as a size of a plan."""
    return s["T"]


def sequences(s: Sizes) -> int:
    """N, as a size of a plan."""
    return s["N"]


def batch(s: Sizes) -> int:
    """B, as a size of a plan."""
    return s["B"]
