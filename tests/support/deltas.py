"""Calls of the delta rule: inputs, results of the oracle, and error budgets."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import contract
import torch
import torch.nn.functional as F
from cases import GATES, Case, Wanted, check_against, offsets, share, spread, upstream
from pools import Pooled
from torch import Tensor

import penstock as ps
from penstock.call.derivatives import gradients_of
from penstock.call.implementation import Mode
from penstock.delta import reference, rounded
from penstock.delta.inputs import canonical, computed
from penstock.delta.operators import ADVANCE, DELTA, FAMILY
from penstock.delta.variants import VARIANTS, Variant

ALL = [implementation.name for implementation in FAMILY.implementations]
TRITON = [name for name in ALL if name.startswith("triton")]
NAMES = [name for name in ALL if name not in (*TRITON, "cuda")]
"""Implementations that run everywhere at full speed. Triton (interpreted) runs small cases."""
FLOAT32_BITS = 24
KEYS = {
    "random": lambda x, centre: x,
    "positive": lambda x, centre: F.silu(x + 0.5),
    "near": lambda x, centre: centre + 0.01 * x,
    "equal": lambda x, centre: centre.expand_as(x),
}
"""Directions of keys, from normal x and a normal vector that all tokens share."""


@dataclass(frozen=True)
class Delta(Case):
    """A call over whole sequences."""

    operator: ClassVar = DELTA

    removed: int = 0
    """heads of a and b, if not those of k"""
    key: str = "random"
    """a name of KEYS"""
    written: float | None = None
    """b in place of random parts of what a removes: keys times this"""
    beta: float | None = None
    """of all tokens; else uniform between 0 and 1, with 0, 1 and 2 among them"""
    raw: bool = False
    """whether q and k, beta and the gate are raw"""
    negative: bool = False
    bound: float | None = None
    biased: bool = True
    centre: float = 0.0
    """of raw gates"""

    @property
    def row(self) -> Variant:
        return VARIANTS[self.variant]

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes
        return sizes | {"J": self.removed or sizes["G"]}

    @property
    def flags(self) -> dict[str, object]:
        """Options of raw inputs."""
        one = self.raw and self.row.streams == 1
        return {"use_qk_l2norm": one, "beta_logits": one, "allow_neg_eigval": one and self.negative, "lower_bound": self.bound}

    @property
    def options(self) -> tuple[object, ...]:
        return self.scale, True, *self.flags.values()

    def drawn(self) -> dict[str, Tensor | None]:
        return draw(self)

    def call(self, tensors: dict[str, Tensor | None], impl: str) -> ps.Result:
        given = {"scale": self.scale, "output_final_state": True, "impl": impl}
        return getattr(ps, self.variant)(**named(self, tensors, self.row.query, self.row.gate), **given)

    def check(self, found: dict[str, Tensor], impl: str, device: str = "cpu") -> None:
        check_against({name: x.cpu() for name, x in found.items()}, oracle(self), self.dtype, allowed(self, impl))


def named(case: Delta, tensors: dict[str, Tensor | None], query: str, gate: str) -> dict[str, object]:
    """The given tensors by the names of a public function, and its options of raw inputs."""
    names = {"q": query, "g": gate, "raw": gate}
    found: dict[str, object] = {names.get(name, name): x for name, x in tensors.items() if x is not None}
    found |= {name: x for name, x in case.flags.items() if x}
    return found | ({"raw_decay": True} if case.raw and case.row.raw == "sigmoid" else {})


@dataclass(frozen=True)
class PooledDelta(Pooled, Delta):
    """A call of ``advance``."""

    operator: ClassVar = ADVANCE

    state: bool = False

    @property
    def options(self) -> tuple[object, ...]:
        return self.scale, *self.flags.values()

    def call(self, tensors: dict[str, Tensor | None], impl: str) -> Tensor:
        return ps.advance(self.variant, **named(self, tensors, "q", "g"), scale=self.scale, impl=impl)

    def more(self, impl: str, exactly: dict[str, Tensor]) -> dict[str, float]:
        """Twice the error of the formula with rounded operands, of implementations that round them."""
        bits = FAMILY.named(impl).operands(self.dtype, "advance")
        if bits is None:
            return {}
        double = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in self.tensors().items()}
        problem = contract.problem_of(self, double)
        found = {"output": rounded.advance(problem, bits), "state": problem.state}
        return {name: 2 * float((x - exactly[name]).norm()) for name, x in found.items()}

    def exact(self, state: Tensor) -> tuple[Tensor, Tensor]:
        double = {name: None if x is None else x.double() for name, x in self.drawn().items()} | {"initial_state": state.double()}
        given = [double.get(name) if name != "cu_seqlens" else offsets(self) for name in DELTA.names]
        return reference.exact(DELTA.checked(self.variant, given, (self.scale, True, *self.flags.values())))


AXES = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "beta": "BTH", "a": "BTHK", "b": "BTHK", "A_log": "H", "initial_state": "NHKV"}
"""Of every tensor but the gate and its bias."""


def draw(case: Delta) -> dict[str, Tensor | None]:
    """The tensors of a case by their declared names, None where the variant or the case has none."""
    rng = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    row, dtype = case.row, case.dtype
    others = case.others or dtype

    def normal(axes: str) -> Tensor:
        return torch.randn([case.sizes[axis] for axis in axes], dtype=torch.float64, generator=rng)

    def keys(heads: str) -> Tensor:
        x = KEYS[case.key](normal(f"BT{heads}K"), normal(f"{heads}K"))
        return x if case.raw and row.streams == 1 else F.normalize(x, dim=-1)

    found: dict[str, Tensor | None] = dict.fromkeys(name for name in DELTA.names if name != "cu_seqlens")
    found |= {"q": normal("BTGK"), "k": keys("G"), "v": case.v_factor * normal("BTHV")}
    if row.streams == 1:
        beta = normal("BTH") if case.raw else torch.rand([case.sizes[axis] for axis in "BTH"], dtype=torch.float64, generator=rng)
        if not case.raw:
            beta[:, : beta.shape[1] // 4] = (torch.arange(beta.shape[1] // 4) % 3).double()[:, None]
        found["beta"] = beta if case.beta is None else torch.full_like(beta, case.beta)
    else:
        removed = keys("J")
        rates = torch.rand(removed.shape, dtype=torch.float64, generator=rng) if case.written is None else case.written
        found |= {"a": -removed, "b": removed * rates}
    if row.decay:
        drawn = normal(row.decay)
        if case.raw and row.raw:
            found["raw"] = drawn + case.centre
            if row.bias:
                found |= {"A_log": normal("H"), "dt_bias": normal(row.bias) if case.biased else None}
        else:
            constant = isinstance(case.gate, float)
            found["g"] = torch.full_like(drawn, case.gate) if constant else GATES[case.gate](drawn)
    if case.state:
        found["initial_state"] = case.state_factor * normal("NHKV")
    if case.still:
        found["v"].zero_()
    alike = ("q", "k", "v", "a", "b")
    found = {name: None if x is None else x.to(dtype if name in alike else others) for name, x in found.items()}
    if case.strided:
        found = {name: None if x is None else spread(x, i) for i, (name, x) in enumerate(found.items())}
    axes = AXES | {"g": row.decay, "raw": row.decay, "dt_bias": row.bias}
    return {name: None if x is None else share(x, axes[name], case.shared) for name, x in found.items()}


@cache
def oracle(case: Delta) -> dict[str, Wanted]:
    """What ``measured`` should be: the token loop in float64 on the same, already rounded, inputs."""
    tensors = {name: None if x is None else x.double().requires_grad_() for name, x in draw(case).items()}
    problem = contract.problem_of(case, {"cu_seqlens": offsets(case)} | tensors)
    results = reference.exact(problem)
    inputs = {name: x for name, x in tensors.items() if x is not None}
    pairs = [(out, d.double()) for out, d in zip(results, upstream(case)) if out.requires_grad]
    grads = [torch.zeros_like(x) for x in inputs.values()]
    if pairs:
        outs, d_outs = zip(*pairs)
        grads = torch.autograd.grad(outs, tuple(inputs.values()), d_outs, allow_unused=True, materialize_grads=True)
    found = dict(zip(("output", "final_state"), results)) | {f"d{name}": grad for name, grad in zip(inputs, grads)}
    wanted = {name: Wanted(x.detach(), float(x.detach().norm())) for name, x in found.items()}
    return wanted | (sums_of_terms(case, tensors, wanted) if "dA_log" in wanted else {})


SERIAL = ("reference", "cpu")
"""Implementations that compute one token after another, without products of pairs."""


def allowed(case: Delta, impl: str) -> dict[str, float]:
    """What rounding of operands adds to the budget; of gradients, by the operands of the backward pass."""
    found, of_gradients = (of_operands(case, impl, mode) for mode in (case.operator.mode, "backward"))
    return found | {name: x for name, x in of_gradients.items() if name.startswith("d")}


def of_operands(case: Delta, impl: str, mode: Mode) -> dict[str, float]:
    """Twice the error of the formula with rounded operands.

    Of operands that are rounded to fewer bits; and of the matrices of pairs, whose inverse amplifies the errors of their sums. A sum of K
    float32 products is off by about sqrt(K) roundings, one over the tokens of a chunk by 8. This matters for correlated keys and for beta
    beyond 1 only. Correlated are normalised keys of one channel, too, which are 1 or -1.
    Kernels that round nothing else get normalised q and k in the dtype of q. Kernels that divide by beta take 2^-100 for 0.
    TF32 products cut operands off instead of rounding them: they are as far off as when rounded to one bit fewer.
    """
    bits = FAMILY.named(impl).operands(case.dtype, mode)
    if bits is not None:
        errors = rounding_errors(case, bits - (bits == rounded.FLOAT16 and case.row.streams == 2))
        least = errors_of_least_beta(case) if case.row.streams == 1 else {}
        return {name: 2 * (x + least.get(name, 0.0)) for name, x in errors.items()}
    if impl in TRITON and case.raw and case.row.streams == 1 and case.dtype.itemsize == 2:
        return {name: 2 * x for name, x in rounding_errors(case, None).items()}
    mild = case.key == "random" and case.K > 1 and (case.beta is None or case.beta <= 1)
    if mild or impl in SERIAL or case.dtype == torch.float64:
        return {}
    return {name: 2 * (case.K**0.5 + 8) * x for name, x in rounding_errors(case, FLOAT32_BITS).items()}


def of_rounded_keys(problem: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and final state in float64, with normalised q and k rounded to a dtype."""
    p = canonical(problem, computed(problem, wide=True))
    return reference.exact(p.with_tensors({"q": p.q.to(dtype).double(), "k": p.k.to(dtype).double()}))


@cache
def rounding_errors(case: Delta, bits: int | None) -> dict[str, float]:
    """The largest errors of all draws. ``bits``: of operands, or None for those of q and k alone."""
    return errors(case, [partial(of_rounded_keys, dtype=case.dtype)] if bits is None else rounded.formulas(bits))


@cache
def errors_of_least_beta(case: Delta) -> dict[str, float]:
    """Of 2^-100 in place of beta, where beta of all tokens is 0."""
    beta = draw(case)["beta"]
    return {} if beta is None or case.raw or beta.any() else errors(case, [of_least_beta])


def of_least_beta(problem: Any) -> tuple[Tensor, Tensor]:
    return reference.exact(problem.with_tensors({"beta": problem.beta + 2.0**-100}))


def errors(case: Delta, formulas: Sequence[Callable[[Any], tuple[Tensor, ...]]]) -> dict[str, float]:
    """Frobenius norms of the errors of all results, the largest of all formulas."""
    tensors = {name: None if x is None else x.double() for name, x in draw(case).items()}
    problem, wanted = contract.problem_of(case, {"cu_seqlens": offsets(case)} | tensors), oracle(case)
    names, found = [f"d{one.name}" for one in problem.signature.arguments if one.gradient], dict[str, float]()
    for formula in formulas:
        with torch.no_grad():
            results = dict(zip(("output", "final_state"), formula(problem)))
        results |= dict(zip(names, gradients_of(formula, problem, [d.double() for d in upstream(case)])))
        for name, one in wanted.items():
            found[name] = max(found.get(name, 0.0), float((results[name] - one.value).norm()))
    return found


def sums_of_terms(case: Delta, tensors: dict[str, Tensor | None], wanted: dict[str, Wanted]) -> dict[str, Wanted]:
    """Gradients of A_log and dt_bias are sums over tokens, whose terms may cancel. Errors are relative to the sums of absolute values."""
    terms, bias = wanted["draw"].value.abs(), tensors["dt_bias"]
    x = tensors["raw"].detach() + (0 if bias is None else bias.detach())
    of_rate = terms * (x.abs() if case.bound is not None else F.softplus(x, threshold=1e3) / x.sigmoid())
    sizes = {"ddt_bias": terms.sum((0, 1)), "dA_log": of_rate.sum((0, 1)).view(case.H, -1).sum(1)}
    return {name: Wanted(wanted[name].value, float(size.norm())) for name, size in sizes.items() if name in wanted}
