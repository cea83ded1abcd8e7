"""What all forms of a pass ask about a call: sizes, kind of decay, how products are taken, levels.

Kernels see q, k, a and b of every head. All but the token-serial one see canonical problems, without raw inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ...gpu import decays
from ...gpu.levels import levels
from ...gpu.plan import Plan
from ...gpu.target import Target, power, precision
from ...tokens.gpu_calls import TokenCall
from .. import inputs
from ..declaration import Advance, Delta, DeltaTokens
from .table import LEAST, KernelConfig, config

NONE, SCALAR, CHANNEL = (kind.value for kind in (decays.NONE, decays.SCALAR, decays.CHANNEL))
C = 64
"""Tokens in a chunk."""
SOLVE = {"bf16": "tf32", "tf32": "tf32x3", "tf32x3": "tf32x3", "ieee": "ieee"}
"""The precision of products with T, by that of other products. Keys may be raw, so T has no bound that float16 needs. float16 inputs have
as many bits as TF32, and errors of T would be larger than theirs if beta is up to 2."""

LOWS = (64, 32, 16, 8)
"""Tokens of blocks that may have one anchor. In smaller blocks it saves at most two levels of six."""
MOST_DECAY = 44.0
"""The most by which an anchored block may decay, with operands of bfloat16 parts. Factors are exp of it: 1e19, and as much is
left for what they multiply. 64 tokens of RWKV-7 decay by at most 39, 8 of KDA bounded by -5 by 40."""
MOST_DECAY_FLOAT32 = 10.0
"""The same with other products. Exact as float32: exp of a rounded sum x has a relative error of 2^-24 |x|. TF32, for float16: gradients of
strong decays, which are differences of anchored sums, had errors of 2.2e-3. 16 tokens of RWKV-7 decay by at most 9.7."""


@dataclass(frozen=True, eq=False)
class Call(TokenCall):
    """A problem on a GPU, with the sizes and choices that all its launches share."""

    gate: tuple[int, ...]
    """Strides of the decay or of raw gates, expanded to [B,T,H,K]."""
    decay: int

    @classmethod
    def of(cls, p: DeltaTokens, target: Target, **more: Any) -> Self:
        """The sizes and choices of a problem; ``more``: fields that a pass adds."""
        return cls(**shared(p, target), **more)

    @property
    def streams(self) -> int:
        """1 or 2."""
        return self.p.variant.streams  # type: ignore[no-any-return]

    @property
    def after(self) -> bool:
        """Whether the removal reads the state after the decay."""
        return self.p.variant.removal == "after"  # type: ignore[no-any-return]

    @property
    def grouped(self) -> str | None:
        """The reason of forms that do not take heads of q and k that groups share."""
        return None if self.p.sizes["G"] == self.H else "it takes q and k of every head of v"

    @property
    def BK(self) -> int:
        """Key channels of a tile."""
        return power(self.K, LEAST)

    @property
    def tile(self) -> torch.dtype:
        """The dtype of tiles in memory. float16 inputs are multiplied as TF32, because states, values and gradients have no bound."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def anchors(self, most: float) -> int:
        """Tokens of the largest blocks that decay by at most ``most``; 0: of none is that known."""
        bound = inputs.bound(self.p)
        if bound is None or self.decay != CHANNEL:
            return 0
        return next((low for low in LOWS if -bound * low <= most), 0)

    @property
    def low(self) -> int:
        """Tokens of blocks with one anchor in place of the inner levels; 0: all levels."""
        return self.anchors(MOST_DECAY if self.precision == "bf16" else MOST_DECAY_FLOAT32)

    @property
    def anchored(self) -> bool:
        """Whether the kernel without levels prepares a chunk: one anchor, two streams, and a head is one tile."""
        return self.low == C and self.streams == 2 and self.BK <= LEAST

    def matrices(self, plan: Plan) -> tuple[str, str]:
        """The matrices of sums of decays per channel, with and without the token's own decay."""
        if self.decay != CHANNEL:
            return "q", "q"
        inclusive = plan.constant("levels", levels, C, False, self.low)
        return inclusive, inclusive if self.after else plan.constant("levels_before", levels, C, True, self.low)

    @property
    def solve(self) -> str:
        """The precision of products with T."""
        return SOLVE[self.precision] if self.target.nvidia else "ieee"

    @property
    def streamed(self) -> tuple[str, str]:
        """The names of a and b."""
        return ("k", "k") if self.streams == 1 else ("a", "b")

    def config(self, kernel: str) -> KernelConfig:
        """Block sizes of a launch."""
        return config(kernel, self.K, self.V, self.precision, self.target)

    def strides(self, *names: str) -> tuple[int, ...]:
        """The strides of tensors [B,T,H,...], in the order of kernel parameters; those of q for missing ones."""
        found: list[int] = []
        for name in names:
            x = getattr(self.p, name)
            if name == "beta":
                found += x.stride() if x is not None else (0, 0, 0)
            elif name == "g":
                found += self.gate
            else:
                found += x.stride()
        return tuple(found)


@dataclass(frozen=True, eq=False)
class InPlace(Call):
    """An update of states in place."""

    p: Advance

    @property
    def pool(self) -> tuple[str, tuple[int, ...]]:
        """The name and strides of the pool, which is the initial and the final state."""
        return "state", self.p.state.stride()

    @property
    def rows(self) -> str:
        """The name of the rows that sequences update, or nothing."""
        return "slots" if self.p.slots is not None else ""


@dataclass(frozen=True, eq=False)
class Forward(Call):
    """A forward pass over whole sequences."""

    p: Delta
    keep: bool = False
    """Whether residuals are kept for the backward pass."""


@dataclass(frozen=True, eq=False)
class Backward(Call):
    """A backward pass over whole sequences."""

    p: Delta
    d_output: Tensor | None = None
    """None where a form is asked for its reasons alone."""
    d_final_state: Tensor | None = None
    state_alone: bool = False
    """Whether only the gradient of the initial state is wanted. It depends on no state."""
    kept: bool = False
    """Whether the forward pass kept residuals."""


def shared(p: DeltaTokens, target: Target) -> dict[str, Any]:
    """The fields of ``Call``: calls of several passes of one problem share them."""
    axes, sizes = p.variant.decay, p.sizes
    gate: tuple[int, ...] = (0, 0, 0, 0)
    given = p.gate if p.raw is None else p.with_tensors({"g": p.raw}).gate
    if given is not None:
        shape = (sizes["B"], sizes["T"], sizes["H"], sizes["K"])
        gate = tuple([step if axis in axes else 0 for axis, step in zip("BTHK", given.expand(shape).stride())])
    return {
        "p": p, "target": target, **p.counts, "H": sizes["H"], "K": sizes["K"], "V": sizes["V"], "packed": p.cu_seqlens is not None,
        "precision": precision(p.q.dtype, target), "gate": gate, "decay": NONE if not axes else CHANNEL if "K" in axes else SCALAR,
    }  # fmt: skip
