"""Random inputs of the recurrence with the distributions of real models, and their shapes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import Complaints, RangeError, shortened
from ..recurrence import functional
from ..recurrence.declaration import Advance, Recurrence
from ..recurrence.operators import ADVANCE, RECURRENCE
from ..recurrence.variants import VARIANTS
from ..tokens.dtypes import state_dtype

GATES = ("soft", "mu-5", "mu-3", "mu-1", "mu0", "mu1", "mu2", "initial", "forgetting")
"""Distributions of decays per channel that ``inputs`` can draw, from the mildest log-normal one to those of trained models."""
MOST_ELEMENTS = 1 << 56
"""Tensors of more elements have no size in bytes that torch can represent."""


class Shape(NamedTuple):
    """Sizes of one call: batch, tokens, heads, key channels and value channels of a head."""

    B: int
    T: int
    H: int
    K: int
    V: int

    @classmethod
    def parse(cls, text: str, function: str = "bench") -> Shape:
        """Read "B,T,H,K" or "B,T,H,K,V"; V defaults to K. Raises RangeError in the name of ``function``.

        >>> Shape.parse("1,54,32,64")
        Shape(B=1, T=54, H=32, K=64, V=64)
        """
        parts = [part.strip() for part in text.split(",")]
        sizes = [int(part) if part.isdecimal() and len(part) <= 18 else 0 for part in parts]
        complaints = Complaints(function)
        if len(sizes) not in (4, 5) or min(sizes) < 1:
            rule = "B,T,H,K or B,T,H,K,V, whole numbers of at least 1"
            complaints.add(RangeError, "shape", rule, shortened(text), "For example --shape 1,1024,32,64.")
        complaints.raise_any()
        shape = cls(*(sizes if len(sizes) == 5 else [*sizes, sizes[3]]))
        if prod(shape) >= MOST_ELEMENTS:
            complaints.add(RangeError, "shape", "one whose B * T * H * K * V is below 2**56", shortened(text))
        complaints.raise_any()
        return shape

    @property
    def text(self) -> str:
        """The text that ``parse`` reads, without V if it equals K."""
        return ",".join(map(str, self[:4] if self.V == self.K else self))

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Shape of the states [B,H,K,V]."""
        return self.B, self.H, self.K, self.V


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, by the names that all variants share (RWKV's r is q, its w is g)."""

    variant: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    u: Tensor | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "variant"}
        return {name: x for name, x in given.items() if x is not None}

    @property
    def trained(self) -> dict[str, Tensor]:
        """The tensors that need gradients: all but RetNet's decays, which are constants."""
        return {name: x for name, x in self.tensors.items() if (self.variant, name) != ("retention", "g")}

    @property
    def shape(self) -> Shape:
        """The sizes of the call."""
        B, T, _, K = self.q.shape
        return Shape(B, T, self.v.shape[2], K, self.v.shape[3])

    @property
    def scale(self) -> float:
        """The default scale of the variant."""
        scale = VARIANTS[self.variant].scale
        return self.q.shape[3] ** -0.5 if scale is None else scale

    def run(self, impl: str) -> Tensor:
        """Call the variant's public function; return its output."""
        call = getattr(functional, self.variant)
        if self.variant == "retention":
            return call(self.q, self.k, self.v, g=self.g, impl=impl).output  # type: ignore[no-any-return]
        return call(*self.tensors.values(), impl=impl).output  # type: ignore[no-any-return]

    def problem(self, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Recurrence:
        """The problem that implementations get for this call."""
        tensors = self.q, self.k, self.v, self.g, self.u, cu_seqlens, initial_state
        return RECURRENCE.checked(self.variant, tensors, (None, False, True))

    def in_place(self, pool: Tensor, slots: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Advance:
        """The problem that implementations get for an update of rows of a pool by these tokens."""
        tensors = self.q, self.k, self.v, self.g, self.u, cu_seqlens, slots, pool
        return ADVANCE.checked(f"advance({self.variant!r})", tensors, (None,))

    def first(self, tokens: int) -> Inputs:
        """The first tokens of every sequence."""
        g = self.g[:, :tokens] if self.g is not None and "T" in VARIANTS[self.variant].decay else self.g
        return Inputs(self.variant, self.q[:, :tokens], self.k[:, :tokens], self.v[:, :tokens], g, self.u)

    def with_gradients(self) -> Inputs:
        """A copy whose ``trained`` tensors require gradients."""
        copies = {name: x.detach().clone().requires_grad_(name in self.trained) for name, x in self.tensors.items()}
        return Inputs(self.variant, copies["q"], copies["k"], copies["v"], copies.get("g"), copies.get("u"))


def inputs(variant: str, shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, gates: str = "") -> Inputs:
    """Random inputs with the distributions of a model of this variant: q, k, v in ``dtype``, decays and bonus in float32 or float64.

    The decays of rwkv6 reach e^-5 per token in every head. Decays per channel can be drawn otherwise by ``gates``, one of ``GATES``,
    where x is normal:

    - "soft": logsigmoid(x)
    - "mu-5" to "mu2": -exp(x + mu)
    - "initial": -exp(-6 + 5 c^0.85 + 0.3 x), c from 0 to 1 over the channels, as a new RWKV-6 has them
    - "forgetting": the same with 6 added to the exponent for 2 % of the channels, which forget everything at each token

    >>> inputs("gla", Shape.parse("1,5,2,8")).g.shape
    torch.Size([1, 5, 2, 8])
    """
    B, T, H, K, V = shape
    place = torch.device(device)
    random = torch.Generator(place).manual_seed(seed)  # drawing on the host would take longer than the measurement

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64, device=place)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=random, dtype=torch.float64, device=place)

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)
    g, u = None, None
    if gates == "soft":
        g = F.logsigmoid(normal(B, T, H, K))
    elif gates:
        g = normal(B, T, H, K)
        if gates.startswith("mu"):
            g = -torch.exp(g + int(gates[2:]))
        else:
            spread = -6 + 5 * torch.linspace(0, 1, K, dtype=torch.float64, device=place) ** 0.85
            forgetting = 6.0 * (uniform(H, K) < 0.02) if gates == "forgetting" else 0.0
            g = -torch.exp(spread + 0.3 * g + forgetting)
    elif variant == "retention":
        g = torch.log1p(-torch.exp2(-5 - torch.arange(H, dtype=torch.float64, device=place)))
    elif variant == "simple_gla":  # Mamba-2 at initialisation: A in 1..16, dt from 0.001 to 0.1; v carries dt, g = -dt A
        A = 1 + 15 * uniform(H)
        middle = 10 ** (-3 + 2 * uniform(H))
        dt = F.softplus(middle.expm1().log() + normal(B, T, H))
        g, v = -dt * A, v * dt[..., None]
    elif variant == "gla":
        g = F.logsigmoid(normal(B, T, H, K)) / 16
    elif variant in ("rwkv5", "rwkv6"):  # decays from slow to fast over the channels, as in trained models
        spread = torch.linspace(-6, 1, K, dtype=torch.float64, device=place).expand(H, K)
        g = -torch.exp(spread + 0.5 * normal(B, T, H, K)) if variant == "rwkv6" else -torch.exp(spread)
    if variant in ("rwkv5", "rwkv6"):
        u = normal(H, K)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    g, u = (None if x is None else x.to(state_dtype(dtype)) for x in (g, u))
    return Inputs(variant, q, k, v, g, u)
