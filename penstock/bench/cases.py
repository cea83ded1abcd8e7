"""What is measured: shapes of real models in one table, and inputs as these models make them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import functional
from ..errors import Complaints, RangeError
from ..problem import Problem, state_dtype
from ..variants import VARIANTS


class Shape(NamedTuple):
    """Sizes of one call: batch, tokens, heads, key channels and value channels of a head."""

    B: int
    T: int
    H: int
    K: int
    V: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read "B,T,H,K" or "B,T,H,K,V"; V is K where it is left out.

        >>> Shape.parse("1,54,32,64")
        Shape(B=1, T=54, H=32, K=64, V=64)
        """
        sizes = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
        if len(sizes) not in (4, 5) or min(sizes) < 1:
            complaints = Complaints("bench")
            complaints.add(
                RangeError, "shape", "B,T,H,K or B,T,H,K,V, whole numbers of at least 1", repr(text), "For example --shape 1,1024,32,64."
            )
            complaints.raise_any()
        return cls(*(sizes if len(sizes) == 5 else [*sizes, sizes[3]]))

    @property
    def text(self) -> str:
        """As ``parse`` reads it; V is left out where it is K."""
        return ",".join(map(str, self[:4] if self.V == self.K else self))

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Shape of the states, one for each sequence."""
        return self.B, self.H, self.K, self.V


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    variant: str
    shape: Shape
    model: str
    """The model whose layer has this shape."""
    soft: bool = False
    """Whether decays are those of ``inputs(..., soft=True)``."""

    @property
    def kind(self) -> str:
        """The variant, and whether decays are soft."""
        return self.variant + "-soft" * self.soft


DECODE_BATCHES = (1, 4, 16, 64, 256)

MODELS = (
    Case("linear-1024", "linear_attention", Shape(1, 1024, 16, 64, 64), "Linear Transformer, 16 heads of 64"),
    Case("retnet-1.3b", "retention", Shape(1, 1024, 8, 256, 512), "RetNet 1.3B"),
    Case("mamba2-1.3b", "simple_gla", Shape(1, 1024, 64, 128, 64), "Mamba-2 1.3B: state 128, heads of 64"),
    Case("gla-1.3b", "gla", Shape(1, 1024, 4, 256, 512), "GLA 1.3B"),
    Case("rwkv5-1.5b", "rwkv5", Shape(1, 1024, 32, 64, 64), "RWKV-5 World 1.5B"),
    Case("rwkv6-1.6b", "rwkv6", Shape(1, 1024, 32, 64, 64), "RWKV-6 World 1.6B"),
    Case("rwkv6-7b", "rwkv6", Shape(1, 1024, 64, 64, 64), "RWKV-6 World 7B"),
    Case("rwkv6-profile", "rwkv6", Shape(1, 54, 32, 64, 64), "RWKV-6 World 1.6B, a prompt of 54 tokens"),
)
"""A prompt, or a stretch of training data, as a layer of these models sees it. A variant's first row is its default."""

DECODING = tuple(
    replace(case, name=f"{case.name}-decode-{batch}", shape=case.shape._replace(B=batch, T=1), model=f"{case.model}, decoding")
    for case in MODELS
    if case.shape.T == 1024
    for batch in DECODE_BATCHES
)
"""One token of these models for batches of 1 to 256 sequences."""


def _sized(kind: str, sizes: str, model: str) -> Case:
    """Name a case by its sizes, as in gla-8x2048x32x64."""
    variant, _, soft = kind.partition("-")
    return Case(f"{kind}-{sizes.replace(',', 'x')}", variant, Shape.parse(sizes), model, bool(soft))


GPU_SHAPES = (
    (
        ("linear_attention", "retention", "simple_gla", "gla", "rwkv6-soft", "rwkv6"),
        "8,2048,32,64",
        "32 heads of 64, a batch that fills a GPU",
    ),
    (("gla", "rwkv6-soft"), "1,65536,32,64", "the same, one long sequence"),
    (("linear_attention", "gla", "rwkv6-soft", "rwkv6"), "4,2048,16,128", "16 heads of 128"),
    (("gla", "rwkv6-soft"), "1,8192,96,128", "a wide model: 96 heads of 128"),
    (("gla", "rwkv6-soft"), "2,16384,16,128", "16 heads of 128, long sequences"),
    (("gla",), "8,2048,4,256,512", "GLA 1.3B: 4 heads of 256 and 512"),
    (("gla", "rwkv6-soft"), "1,2048,32,64", "one sequence: few programs"),
    (("gla", "rwkv6-soft"), "1,54,32,64", "a prompt of 54 tokens: the host decides"),
)
"""Training and prompts on a GPU: the variants measured, their sizes, and what these are like. Others measure rwkv6 with soft decays."""
GPU_TRAINING = tuple(_sized(kind, sizes, model) for kinds, sizes, model in GPU_SHAPES for kind in kinds)
GPU_DECODING = tuple(
    _sized(variant, f"{batch},1,32,64", f"one token, {batch} sequence{'s' * (batch > 1)}")
    for variant in ("gla", "rwkv6")
    for batch in (1, 256, 1024)
)
LENGTHS = tuple(
    _sized("rwkv6", f"1,{length},32,64", "one sequence, ever longer") for length in (2048, 4096, 8192, 16384, 32768, 65536, 131072, 163840)
)

SOFTMAX = tuple(
    _sized("softmax_attention", sizes, model)
    for sizes, model in (("4,4096,16,128", "16 heads of 128"), ("8,2048,32,64", "32 heads of 64"), ("1,16384,32,128", "one long sequence"))
)
"""Causal softmax attention, as the layers of hybrid models between the recurrent ones."""
SOFTMAX_MODEL = Case("llama-7b", "softmax_attention", Shape(1, 1024, 32, 128, 128), "Llama 7B: 32 heads of 128")
"""Its default, as the first rows of the models are for the variants."""

CASES = tuple({case.name: case for case in (*MODELS, SOFTMAX_MODEL, *DECODING, *LENGTHS, *GPU_TRAINING, *GPU_DECODING, *SOFTMAX)}.values())
"""Every case by which ``penstock bench`` can be asked. Two of the lengths are training shapes as well."""


def case_named(name: str) -> Case:
    """Find the case of this name, or raise RangeError."""
    found = [case for case in CASES if case.name == name]
    if not found:
        complaints = Complaints("bench")
        complaints.add(RangeError, "case", f"one of {', '.join(case.name for case in CASES)}", repr(name), "See penstock bench --list.")
        complaints.raise_any()
    return found[0]


def default_cases(variant: str, decode: bool) -> list[Case]:
    """List what is measured where nothing is named: a variant's first model, or all its batches for decoding."""
    first = next(case for case in (*MODELS, SOFTMAX_MODEL) if case.variant == variant)
    return [case for case in DECODING if case.name.startswith(f"{first.name}-decode-")] if decode else [first]


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, under the names that all variants share (RWKV's r is q, its w is g)."""

    variant: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    u: Tensor | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are not None, by name."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "variant"}
        return {name: x for name, x in given.items() if x is not None}

    @property
    def trained(self) -> dict[str, Tensor]:
        """Those that a model learns or computes: all but RetNet's decays, which are fixed numbers."""
        return {name: x for name, x in self.tensors.items() if (self.variant, name) != ("retention", "g")}

    @property
    def shape(self) -> Shape:
        """The sizes of the call."""
        B, T, H, K = self.q.shape
        return Shape(B, T, H, K, self.v.shape[3])

    @property
    def scale(self) -> float:
        """The variant's default."""
        scale = VARIANTS[self.variant].scale
        return self.q.shape[3] ** -0.5 if scale is None else scale

    def run(self, impl: str) -> Tensor:
        """Call the variant's public function; return its output."""
        call = getattr(functional, self.variant)
        if self.variant == "retention":
            return call(self.q, self.k, self.v, g=self.g, impl=impl).output  # type: ignore[no-any-return]
        return call(*self.tensors.values(), impl=impl).output  # type: ignore[no-any-return]

    def problem(self, initial_state: Tensor | None = None) -> Problem:
        """Show the same call as the implementations see it."""
        return Problem.checked(self.q, self.k, self.v, self.g, self.u, initial_state, None, self.variant, None, False)

    def first(self, tokens: int) -> Inputs:
        """Keep the first tokens of every sequence."""
        g = self.g[:, :tokens] if self.g is not None and "T" in VARIANTS[self.variant].decay else self.g
        return Inputs(self.variant, self.q[:, :tokens], self.k[:, :tokens], self.v[:, :tokens], g, self.u)

    def with_gradients(self) -> Inputs:
        """Copy the values into tensors, those that are ``trained`` requiring gradients."""
        copies = {name: x.detach().clone().requires_grad_(name in self.trained) for name, x in self.tensors.items()}
        return Inputs(self.variant, copies["q"], copies["k"], copies["v"], copies.get("g"), copies.get("u"))


def inputs(
    variant: str, shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, soft: bool = False
) -> Inputs:
    """Random inputs as a model of this variant makes them: q, k, v in ``dtype``, decays and bonus in float32 or float64.

    rwkv6's decays reach e^-5 a token in every head; ``soft`` ones are logsigmoid(x), x normal, for all channels.

    >>> inputs("gla", Shape.parse("1,5,2,8")).g.shape
    torch.Size([1, 5, 2, 8])
    """
    B, T, H, K, V = shape
    at = torch.device(device)
    random = torch.Generator(at).manual_seed(seed)  # numbers drawn on the host would take longer than everything measured

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64, device=at)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=random, dtype=torch.float64, device=at)

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)
    g, u = None, None
    if soft:
        g = F.logsigmoid(normal(B, T, H, K))
    elif variant == "retention":
        g = torch.log1p(-torch.exp2(-5 - torch.arange(H, dtype=torch.float64, device=at)))
    elif variant == "simple_gla":  # Mamba-2 at initialisation: A in 1..16, dt from 0.001 to 0.1; v carries dt, g = -dt A
        A = 1 + 15 * uniform(H)
        middle = 10 ** (-3 + 2 * uniform(H))
        dt = F.softplus(middle.expm1().log() + normal(B, T, H))
        g, v = -dt * A, v * dt[..., None]
    elif variant == "gla":
        g = F.logsigmoid(normal(B, T, H, K)) / 16
    elif variant in ("rwkv5", "rwkv6"):  # channels from long to short memory, as these models initialise and train them
        spread = torch.linspace(-6, 1, K, dtype=torch.float64, device=at).expand(H, K)
        g = -torch.exp(spread + 0.5 * normal(B, T, H, K)) if variant == "rwkv6" else -torch.exp(spread)
    if variant in ("rwkv5", "rwkv6"):
        u = normal(H, K)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    g, u = (None if x is None else x.to(state_dtype(dtype)) for x in (g, u))
    return Inputs(variant, q, k, v, g, u)
