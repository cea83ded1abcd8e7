"""What all forms of a pass ask about a call: sizes, kind of decay, how products are taken, segments.

Kernels, constants and whether sequences are split into segments depend on ``Problem.counts``. Grids, numbers and shapes are functions of
the exact sizes, so calls with equal counts share a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ...gpu import decays
from ...gpu.levels import levels
from ...gpu.plan import Plan, chunks
from ...gpu.target import Target, from_registers, power, precision
from ...tokens.gpu_calls import TokenCall
from ..declaration import Advance, Recurrence, Tokens
from .table import DECAYS, LEAST, READS, KernelConfig, Key, config

LIMITS = {"bf16": 200.0, "tf32": 200.0, "tf32x3": 32.0, "ieee": 32.0}
"""The strongest scalar decay of a chunk, log2 units, whose decays between tokens are differences of sums. If products have float32
accuracy, these need it too (half an ulp of 32 is 2e-6)."""

NONE, SCALAR, CHANNEL = (kind.value for kind in (decays.NONE, decays.SCALAR, decays.CHANNEL))
FEW = 16
"""Up to this many tokens the rounding error of a float32 state that decays at each token, 2^-24 each, stays below its budget."""


@dataclass(frozen=True, eq=False)
class Call(TokenCall):
    """A problem on a GPU, with the sizes and choices that all its launches share."""

    p: Tokens
    gate: tuple[int, ...]
    """Strides of the decay, expanded to [B,T,H,K]."""
    decay: int
    static: bool
    previous: bool
    half: bool
    """Whether states are sums of products in float16: for decays per channel in float16 on Hopper."""
    configs: dict[str, KernelConfig] = field(repr=False)
    """Block sizes that were looked up."""

    @classmethod
    def of(cls, p: Tokens, target: Target, **more: Any) -> Self:
        """The sizes and choices of a problem; ``more``: fields that a pass adds."""
        return cls(**shared(p, target), **more)

    @property
    def pending(self) -> bool:
        """Whether the token-serial kernels keep decays pending. Always for packed sequences: the host does not know their lengths."""
        return self.decay != NONE and (self.packed or self.T > FEW)

    @property
    def parts(self) -> tuple[int, ...]:
        """PART of each launch of a chunk kernel. With decays per channel the second launch has the code for strong decays."""
        return (1, 2) if self.decay == CHANNEL else (0,)

    @property
    def flags(self) -> dict[str, Any]:
        """The constants of every chunk kernel."""
        sizes, limit = {"K": self.K, "V": self.V}, LIMITS[self.precision]
        return {**sizes, "DECAY": self.decay, "STATIC": self.static, "PACKED": self.packed, "PRECISION": self.precision, "LIMIT": limit}

    @property
    def bonus(self) -> tuple[int, ...]:
        """The strides of u."""
        return self.p.u.stride() if self.p.u is not None else (0, 0)

    def levels(self, plan: Plan, C: int) -> str:
        """The matrices of sums of decays per channel, for chunks of C tokens."""
        return plan.constant("levels", levels, C, self.previous, 0) if self.decay == CHANNEL else "q"

    def key(self, kernel: str) -> Key:
        """The key of a kernel's block sizes in the tables."""
        products = "bf16" if self.half and kernel == "states" else self.precision  # both have operands of 16 bits
        return Key(kernel, DECAYS[self.decay], READS[self.previous], products, power(self.K), power(self.V))

    def config(self, kernel: str) -> KernelConfig:
        """Block sizes of a launch, no larger than the head."""
        found = self.configs.get(kernel)
        if found is None:
            found = self.configs[kernel] = self._config(kernel)
        return found

    def _config(self, kernel: str) -> KernelConfig:
        key = self.key(kernel)
        b = config(key, self.target)
        if kernel == "forward" and self.K % 16 and from_registers(self.target) and key not in self.target.table:
            b = b._replace(C=min(b.C, 16))  # addresses of such heads take registers: gla at 100 spilled 400 bytes on sm_80, 460 on gfx942
        least = 16 if kernel in ("states", "recurrent", "step") else LEAST
        return b._replace(BK=min(power(self.K, least), b.BK), BV=min(power(self.V, least), b.BV))

    def stored(self, C: int) -> torch.dtype:
        """The dtype of stored states before chunks of C tokens. Products round them to bfloat16, but a caller's own state stays float32."""
        return torch.bfloat16 if self.precision == "bf16" and self.T > C else torch.float32


@dataclass(frozen=True, eq=False)
class InPlace(Call):
    """An update of states in place."""

    p: Advance


@dataclass(frozen=True, eq=False)
class Whole(Call):
    """A pass over whole sequences."""

    p: Recurrence


@dataclass(frozen=True, eq=False)
class Forward(Whole):
    """A forward pass over whole sequences by chunks."""

    keep: bool
    """Whether states before chunks are kept for the backward pass."""
    backward_chunk: int
    """Tokens in a chunk of the backward pass of this problem."""

    def unit(self, C: int) -> int:
        """Segments are multiples of this many tokens.

        They suit the chunks of the backward pass whether states are kept or not, because ``keep`` must change no result.
        """
        return self.backward_chunk if self.backward_chunk % C == 0 else C

    def every(self, C: int, over: int = 0) -> int:
        """Tokens between the states that the forward pass keeps, or 0: only if chunks of the backward pass are multiples of its C tokens.

        None are kept of calls of up to ``over`` tokens.
        """
        L = self.backward_chunk
        dense = chunks(self.T, L, self.N, self.packed) * L <= 2 * self.B * self.T  # many short sequences have more slots than tokens
        return L if self.keep and L % C == 0 and dense and over < self.T else 0


@dataclass(frozen=True, eq=False)
class Backward(Whole):
    """A backward pass over whole sequences."""

    d_output: Tensor | None = None
    """None where a forward pass asks for the form of the backward pass that will follow."""
    d_final_state: Tensor | None = None
    states: Tensor | None = None
    """States before chunks that the forward pass kept. They are recomputed if None, or if they are those before other chunks: strides and
    the precision of products may have changed since."""
    dg: bool = True
    """Whether the gradient of the decay is computed."""

    @property
    def upstream(self) -> Tensor:
        """The gradient of the output."""
        assert self.d_output is not None
        return self.d_output


def shared(p: Tokens, target: Target) -> dict[str, Any]:
    """The fields of ``Call``: calls of several passes of one problem share them."""
    axes, sizes = p.variant.decay, p.sizes
    decay = NONE if not axes else CHANNEL if "K" in axes else SCALAR
    gate: tuple[int, ...] = (0, 0, 0, 0)
    if p.gate is not None:  # torch keeps strides of axes of size 1: empty sequences after a single token would load beyond g
        gate = tuple([step if axis in axes else 0 for axis, step in zip("BTHK", p.gate.expand(p.q.shape).stride())])
    half = p.q.dtype == torch.float16 and decay == CHANNEL and target.arch == "sm_90"
    return {
        "p": p, "target": target, **p.counts, "H": sizes["H"], "K": sizes["K"], "V": sizes["V"], "gate": gate, "decay": decay,
        "static": bool(axes) and "T" not in axes, "previous": p.variant.read == "previous", "packed": p.cu_seqlens is not None,
        "precision": precision(p.q.dtype, target), "half": half, "configs": {},
    }  # fmt: skip
