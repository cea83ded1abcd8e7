"""Calls of the recurrence over whole sequences: inputs, results of the oracle, and error budgets.

A ``Case`` names a call; its tensors follow from it by a seed, so a case is a test's id and a key of the oracle's cache.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import contract
import torch
from torch import Tensor

import penstock as ps
from penstock.recurrence import reference
from penstock.recurrence.declaration import Recurrence
from penstock.recurrence.operators import FAMILY, RECURRENCE
from penstock.recurrence.variants import VARIANTS, Variant
from penstock.tokens.dtypes import state_dtype

ALL = [implementation.name for implementation in FAMILY.implementations]
TRITON = [name for name in ALL if name.startswith("triton")]
NAMES = [name for name in ALL if name not in (*TRITON, "cuda")]
"""Implementations that run everywhere at full speed. Triton (interpreted) and CUDA (emulated) run small cases."""


@dataclass(frozen=True)
class Case:
    """A call over whole sequences."""

    operator: ClassVar = RECURRENCE

    variant: str
    T: int = 17
    B: int = 2
    H: int = 3
    G: int = 0
    """heads of q and k, if not H"""
    K: int = 16
    V: int = 16
    dtype: torch.dtype = torch.float32
    others: torch.dtype | None = None
    """dtype of decay, bonus and initial state, if not that of q, k and v"""
    gate: str | float = "logsigmoid"
    """a name of GATES, or one decay for all tokens and channels"""
    lengths: tuple[int, ...] | None = None
    """of packed sequences; then B and T follow from them"""
    state: bool = True
    reverse: bool = False
    scale: float | None = None
    strided: bool = False
    shared: str = ""
    """axes along which all elements of a tensor lie in one place (strides of 0); "group": heads of q and k; or "overlap": neighbours on
    every axis lie one apart"""
    still: bool = False
    """whether v and the output's gradient are 0: states and their gradients only decay"""
    upstream_factor: float = 1.0
    """of the gradients of output and final state"""
    v_factor: float = 1.0
    state_factor: float = 1.0
    """of the initial state"""

    def __str__(self) -> str:
        changed = [f"{f.name}={contract.shortened(getattr(self, f.name))}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return "-".join([self.variant, *changed])

    @property
    def row(self) -> Variant:
        return VARIANTS[self.variant]

    @property
    def sizes(self) -> dict[str, int]:
        """Axis letters to sizes, N among them."""
        B, T, N = (self.B, self.T, self.B) if self.lengths is None else (1, sum(self.lengths), len(self.lengths))
        return {"B": B, "T": T, "H": self.H, "G": self.G or self.H, "K": self.K, "V": self.V, "N": N}

    @property
    def function(self) -> str:
        return self.variant

    @property
    def options(self) -> tuple[object, ...]:
        return self.scale, self.reverse, True

    def tensors(self, device: str = "cpu") -> dict[str, Tensor | None]:
        """By the declared names of the arguments."""
        return {name: None if x is None else x.to(device) for name, x in (self.drawn() | {"cu_seqlens": offsets(self)}).items()}

    def drawn(self) -> dict[str, Tensor | None]:
        """The floating-point ones."""
        return draw(self)

    def upstream(self, device: str = "cpu") -> tuple[Tensor, ...]:
        return tuple(d.to(device) for d in upstream(self))

    def call(self, tensors: dict[str, Tensor | None], impl: str) -> ps.Result:
        return call(self, tensors, impl)

    def check(self, found: dict[str, Tensor], impl: str, device: str = "cpu") -> None:
        check_against({name: x.cpu() for name, x in found.items()}, oracle(self), self.dtype)


def long_cases(variant: str) -> list[Case]:
    """Thousands of tokens: rounding errors of the decays must not add up."""
    of = Case(variant, B=1, H=3, K=16, V=8, T=4096)
    if not VARIANTS[variant].decay:
        return [of]
    return [*(replace(of, gate=gate) for gate in ("drift", "mixture", "weak")), replace(of, gate="weak", still=True)]


def draw(case: Case) -> dict[str, Tensor | None]:
    """The tensors of a case by name, None where the variant or the case has none."""
    rng = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    others = case.others or case.dtype

    def normal(axes: str, dtype: torch.dtype) -> Tensor:
        return torch.randn([case.sizes[axis] for axis in axes], dtype=torch.float64, generator=rng).to(dtype)

    tensors = {"q": normal("BTGK", case.dtype), "k": normal("BTGK", case.dtype), "v": normal("BTHV", case.dtype)}
    drawn = normal(case.row.decay, torch.float64) if case.row.decay else None
    constant = isinstance(case.gate, float)
    tensors["g"] = None if drawn is None else (torch.full_like(drawn, case.gate) if constant else GATES[case.gate](drawn)).to(others)
    tensors["u"] = normal("HK", others) if case.row.bonus else None
    tensors["initial_state"] = normal("NHKV", others) if case.state else None
    if case.still:
        tensors["v"].zero_()
    tensors["v"] *= case.v_factor
    if case.state:
        tensors["initial_state"] *= case.state_factor
    if case.strided:
        tensors = {name: None if x is None else spread(x, i) for i, (name, x) in enumerate(tensors.items())}
    axes = AXES | {"g": case.row.decay}
    if case.shared == "group":
        return {name: share(x, axes[name], "H") if name in ("q", "k") else x for name, x in tensors.items()}
    return {name: None if x is None else share(x, axes[name], case.shared) for name, x in tensors.items()}


AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "u": "HK", "initial_state": "NHKV", "output": "BTHV", "final_state": "NHKV", "slots": "N"}
"""Of every tensor but the decay."""
SHARED = ("BN", "T", "H", "KV", "overlap")
"""What ``Case.shared`` is tested with."""


def uneven(x: Tensor) -> Tensor:
    """Weak, strong and very strong by spans of 32 tokens."""
    strength = torch.tensor([30.0, 130.0, 260.0, 260.0, 30.0, 600.0])  # log2 units that 32 tokens decay by at most
    if x.dim() == 4:
        strength = strength[torch.arange(x.shape[1]) // 32 % 6][:, None, None]
    else:
        strength = strength[1]
    return strength * (0.6 + 0.4 * x.tanh()) * (-math.log(2) / 32)


GATES = {
    "logsigmoid": torch.nn.functional.logsigmoid,
    "zero": torch.zeros_like,
    "drift": lambda x: torch.full_like(x, -1e-4),
    "weak": lambda x: torch.tensor([-1e-8, -3e-8, -1e-6]).to(x)[torch.arange(x.shape[-1]) % 3].expand_as(x).clone(),
    "gone": lambda x: torch.full_like(x, -1000.0),
    "-1e4": lambda x: torch.where(x > 0, -0.1, -1e4),
    "-inf": lambda x: torch.where(x > 0, -0.1, -torch.inf),
    "mixture": lambda x: torch.where(x > 0.8, -1000.0, torch.where(x < -0.8, -torch.inf, -1e-4)).to(x),
    "spikes": lambda x: torch.where(x > 1.5, -2661.0, torch.where(x < -1.8, -torch.inf, torch.nn.functional.logsigmoid(x))),
    "channels": lambda x: torch.where(torch.arange(x.shape[-1]) % 50 == 3, -100.0, torch.nn.functional.logsigmoid(x)),
    "logsigmoid/16": lambda x: torch.nn.functional.logsigmoid(x) / 16,
    "logsigmoid/0.1": lambda x: torch.nn.functional.logsigmoid(x) / 0.1,
    **{f"-exp(N({mu},1))": lambda x, mu=mu: -(x + mu).exp() for mu in range(-5, 3)},
    "uneven": uneven,
}


def spread(x: Tensor, way: int) -> Tensor:
    """The same values with gaps between neighbours on the last axis, or with two axes swapped in memory."""
    if way % 2 and x.dim() > 1:
        return x.transpose(-2, -1).contiguous().transpose(-2, -1)
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
    wide[..., 1::2] = x
    return wide[..., 1::2]


def share(x: Tensor, axes: str, shared: str) -> Tensor:
    """Memory that elements share, as ``Case.shared`` says; their values change to what lies there."""
    if not shared or not x.numel():
        return x
    if shared == "overlap":
        return x.flatten().as_strided(x.shape, [1] * x.dim())
    first = tuple(slice(1) if axis in shared else slice(None) for axis in axes)
    return x[first].expand_as(x)


def offsets(case: Case) -> Tensor | None:
    """cu_seqlens of a packed case."""
    if case.lengths is None:
        return None
    found = torch.tensor([0, *case.lengths]).cumsum(0)
    if case.shared and not any(case.lengths):
        return found[:1].expand_as(found)
    return torch.stack((found, found + 7), 1)[:, 0] if case.strided else found


def upstream(case: Case) -> tuple[Tensor, Tensor]:
    """Gradients of output and final state."""
    rng = torch.Generator().manual_seed(1)
    shapes = ([case.sizes[axis] for axis in axes] for axes in ("BTHV", "NHKV"))
    d_output, d_final_state = (case.upstream_factor * torch.randn(shape, dtype=torch.float64, generator=rng) for shape in shapes)
    if case.still:
        d_output.zero_()
    d_output, d_final_state = d_output.to(case.dtype), d_final_state.to(state_dtype(case.dtype))
    return share(d_output, AXES["output"], case.shared), share(d_final_state, AXES["final_state"], case.shared)


def problem_of(case: Case, tensors: dict[str, Tensor | None]) -> Recurrence:
    """The problem of a case with these tensors."""
    return contract.problem_of(case, {"cu_seqlens": offsets(case)} | tensors)


def named(case: Case, tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The given tensors by the names of the variant's public function."""
    names = {"q": case.row.query, "g": case.row.gate}
    return {names.get(name, name): x for name, x in tensors.items() if x is not None}


def call(case: Case, tensors: dict[str, Tensor | None], impl: str, **changed: object) -> ps.Result:
    """The public function of the case's variant."""
    options = {"scale": case.scale, "reverse": case.reverse, "cu_seqlens": offsets(case), "output_final_state": True}
    return getattr(ps, case.variant)(**options | named(case, tensors) | changed, impl=impl)


class Wanted(NamedTuple):
    """An exact value, and the size that errors are relative to."""

    value: Tensor
    size: float


@cache
def oracle(case: Case) -> dict[str, Wanted]:
    """What ``measured`` should be: the token loop in float64 on the same, already rounded, inputs.

    A constant decay is given to the oracle once a token, so that its gradient is a sum known term by term. The terms can
    cancel; errors of the sum are relative to the sum of their absolute values.
    """
    tensors = {name: None if x is None else x.double() for name, x in draw(case).items()}
    static = case.row.decay in ("H", "HK")
    if static:
        tensors["g"] = tensors["g"].expand(case.sizes["B"], case.sizes["T"], *tensors["g"].shape).clone()
        case = replace(case, variant={"H": "simple_gla", "HK": "rwkv6"}[case.row.decay])
    for x in tensors.values():
        if x is not None:
            x.requires_grad_()
    output, final_state = reference.exact(problem_of(case, tensors).whole)
    inputs = {name: x for name, x in tensors.items() if x is not None}
    pairs = [(out, d.double()) for out, d in zip((output, final_state), upstream(case)) if out.requires_grad]
    if pairs:
        outs, d_outs = zip(*pairs)
        grads = torch.autograd.grad(outs, tuple(inputs.values()), d_outs, allow_unused=True, materialize_grads=True)
    else:
        grads = [torch.zeros_like(x) for x in inputs.values()]
    found = {"output": output, "final_state": final_state} | {f"d{name}": grad for name, grad in zip(inputs, grads)}
    wanted = {name: Wanted(x.detach(), float(x.detach().norm())) for name, x in found.items()}
    if static:
        terms = wanted["dg"].value
        wanted["dg"] = Wanted(terms.sum((0, 1)), float(terms.abs().sum((0, 1)).norm()))
    return wanted


def arithmetic(inputs: torch.dtype) -> float:
    """The relative error allowed to what is computed from q of one dtype, before it is rounded to its own."""
    return 1e-12 if inputs == torch.float64 else 2e-6


def budget(found: Tensor, wanted: Wanted, inputs: torch.dtype) -> float:
    """How far a result may be from the oracle's, as a Frobenius norm.

    Implementations compute in float32 (float64 for float64 inputs) and round once, at the end; so a float16 or bfloat16
    result may be off by float32's budget and one rounding. That is tighter than what the design allows to kernels whose
    products take rounded operands; one that does so needs a wider budget, derived from such a formula. Errors below
    a dtype's smallest subnormal are allowed.
    """
    kind = torch.finfo(found.dtype)
    rounding = kind.eps / 2 if kind.eps > 1e-7 or inputs == torch.float64 else 0  # float32's is part of its 2e-6
    underflow = kind.smallest_normal * kind.eps / 2 * found.numel() ** 0.5
    return arithmetic(inputs) * wanted.size + rounding * float(wanted.value.norm()) + underflow


def distance(found: Tensor, wanted: Wanted) -> float:
    """Frobenius norm of the difference; infinite if anything is not finite."""
    return float((found.double() - wanted.value).norm()) if bool(found.isfinite().all()) else torch.inf


def check_against(
    found: dict[str, Tensor], wanted: dict[str, Wanted], inputs: torch.dtype, more: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Every result of a call within its budget; the failure names all that are not. What is exactly 0 must come out as 0.

    ``more``: what is added to the budget of a result.
    """
    assert {name: x.shape for name, x in found.items()} == {name: x.value.shape for name, x in wanted.items()}
    pairs = {name: (distance(x, wanted[name]), budget(x, wanted[name], inputs) + more.get(name, 0.0)) for name, x in found.items()}
    over = [f"{name}: off by {off:.2e}, allowed {allowed:.2e}" for name, (off, allowed) in pairs.items() if not off <= allowed]
    assert not over, "; ".join(over)


NEAR_UNDERFLOW = (-80.0, -86.0, -87.0, -87.3, -88.0, -90.0, -103.0, -104.0)
"""Log decays whose exponentials are among float32's smallest numbers: exp(-87.33) is the last normal one."""


def check_near_underflow(case, results):
    """dg = exp(g) rowsum(S o dS), with dS large enough to make it visible. Factors below the smallest normal number may be flushed to 0."""
    for g in NEAR_UNDERFLOW:
        found, wanted = (of(replace(case, gate=g, upstream_factor=1e30)) for of in (results, oracle))
        off, size = distance(found["dg"], wanted["dg"]), wanted["dg"].size
        flushed = (
            torch.finfo(torch.float32).smallest_normal / math.exp(g) * size
            if math.exp(g) < torch.finfo(torch.float32).smallest_normal
            else 0
        )
        assert off <= arithmetic(case.dtype) * size + flushed, g
