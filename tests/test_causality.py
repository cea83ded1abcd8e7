"""Outputs before a cut have equal bits whatever comes after it: by every implementation, every chunk kernel for a GPU, in every dtype."""

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import deltas
import emulated
import pytest
import torch
from attention import IMPLEMENTATIONS, Attention
from cases import ALL, NAMES, Case
from contract import Tensors, problem_of
from cuts import CUTS, Used, changed, followed
from emulated import gluon
from pools import Pooled
from torch import Tensor

from penstock.call.operator import Operator
from penstock.gpu.target import Target
from penstock.recurrence.cuda import launch
from penstock.recurrence.operators import RECURRENCE
from penstock.recurrence.triton import in_place, plan
from penstock.recurrence.triton.forms import scalars_sm90
from penstock.recurrence.variants import VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
"""NumPy's, of values in the interpreter that masks discard."""

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

H200, A100 = Target("sm_90", 1, 232448), Target("sm_80", 1, 163 << 10)
"""With so few multiprocessors that sequences are not cut into segments."""


class Form(NamedTuple):
    """What computes a call: an implementation, or the kernels that ``triton_chunkwise`` launches on a GPU, emulated."""

    impl: str
    target: Target | None = None
    precision: str = "highest"
    """of float32 products"""

    def __str__(self) -> str:
        return self.impl if self.target is None else f"{self.target.arch}-{self.precision}"

    def output(self, case: Used, tensors: Tensors) -> Tensor:
        """The output of a call."""
        operator: Operator[Any] = case.operator
        tensors = {name: x.clone() if name == "state" else x for name, x in tensors.items()}
        problem, one = problem_of(case, tensors).whole, operator.family.named(self.impl)
        with torch.no_grad():
            if self.target is not None:
                return self.emulated(problem)
            return one.advance(problem) if operator.in_place else one.forward(problem)[0]

    def emulated(self, problem: Any) -> Tensor:
        """The output of the chunk kernels; of an update in place, of whole pieces."""
        torch.set_float32_matmul_precision(self.precision)
        if problem.operator.in_place:
            made = in_place.advance_plan(problem, self.target)
            del made.launches[1:]
        else:
            made = plan.chunk_forward_plan(problem, self.target)
        tensors = {name: problem.q if x is None else x for name, x in zip(problem.operator.names, problem.tensors)}
        tensors |= {name: function(*given, torch.device("cpu")) for name, (function, *given) in made.constants.items()}
        return gluon.run(made, tensors, problem.sizes)["output"].nan_to_num(7.0)


class Declared(NamedTuple):
    """Calls of ``triton_chunkwise`` whose outputs may depend on later tokens of the same chunk. docs/recurrence.md says why."""

    form: str
    dtypes: tuple[torch.dtype, ...]
    most: float
    """Frobenius norm of the difference over that of the outputs before the cut."""
    decays: tuple[str, ...]

    def covers(self, form: Form, case: Used) -> bool:
        return isinstance(case, Case) and str(form) == self.form and case.dtype in self.dtypes and case.row.decay in self.decays


CHANNELS = ("BTHK", "HK")
DECLARED = (
    Declared("sm_80-highest", (FLOAT32,), 1e-6, CHANNELS),
    Declared("sm_80-high", (FLOAT32,), 2e-3, CHANNELS),
    Declared("sm_80-highest", (FLOAT16,), 2e-3, CHANNELS),
    Declared("sm_80-highest", (BFLOAT16,), 1e-2, CHANNELS),
    Declared("triton_chunkwise", (FLOAT32,), 1e-6, CHANNELS),
)
"""All exceptions. Calls that these do not cover have equal bits."""


def difference(form: Form, case: Used, tensors: Tensors, whole: Tensor, cut: int, after: str) -> float:
    """How far outputs before a cut are from those with other tokens after it: 0 for equal bits."""
    found = form.output(case, changed(case, tensors, cut, after))[:, :cut]
    wanted = whole[:, :cut]
    return 0.0 if torch.equal(found, wanted) else float((found.double() - wanted.double()).norm() / wanted.double().norm())


def differences(form: Form, case: Used, each: int, first: int = 0) -> dict[tuple[int, str], float]:
    """The differences that are not 0, of every ``each``-th pair of a cut and what follows it."""
    tensors = case.tensors()
    whole = form.output(case, tensors)
    cuts = [cut for cut in CUTS if cut < whole.shape[1]]
    pairs = list(product(cuts, followed(case, form.impl)))[first % each :: each]
    found = {pair: difference(form, case, tensors, whole, *pair) for pair in pairs}
    return {pair: x for pair, x in found.items() if x != 0}


def dtypes(form: Form) -> tuple[torch.dtype, ...]:
    if form.precision != "highest":
        return (FLOAT32,)
    if form.target is not None:
        return FLOAT32, BFLOAT16, FLOAT16
    return (FLOAT32, FLOAT16) if form.impl not in NAMES else (FLOAT64, FLOAT32, BFLOAT16, FLOAT16)


PLANNED = [Form("triton_chunkwise", target, precision) for target in (H200, A100) for precision in ("highest", "high")]
FORMS = [*map(Form, ALL), *PLANNED]


def cases(form: Form) -> list[Case]:
    """Every variant and dtype; with an initial state and without; packed; heads that have kernels of their own; updates in place."""
    sizes = ((64, 64), (128, 64), (256, 64)) if form.target == H200 else ((64, 64),) if form.target else ((32, 32),)
    T = 100 if form.target or form.impl in NAMES else 40 if form.impl == "triton_chunkwise" else 12
    variants = [name for name, row in VARIANTS.items() if form.impl != "cuda" or row.bonus]
    found: list[Case] = []
    for number, (variant, dtype, (K, V)) in enumerate(product(variants, dtypes(form), sizes)):
        of = Case(variant, B=1, H=1, T=T, K=K, V=V, dtype=dtype, state=number % 2 == 0)
        found += [of, *[replace(of, lengths=(100, 30))] * (form.target is not None)]
        if (form.target is None and form.impl != "triton_chunkwise") or (form.target == H200 and "K" in VARIANTS[variant].decay):
            found += [Pooled(variant, B=1, H=1, T=T + 28, K=K, V=V, dtype=dtype, rows=1)]
        if VARIANTS[variant].decay:
            found += [replace(of, gate="mixture", state=number % 2 == 1), replace(of, gate="logsigmoid/16")]
    return found


def attention_cases() -> list[Attention]:
    of = Attention(B=1, Tq=100, Tk=100, H=2)
    return [of, replace(of, window=40), replace(of, dtype=FLOAT16, D=32), replace(of, dtype=BFLOAT16, D=32), replace(of, dtype=FLOAT64)]


EVERY = [(form, case) for form in FORMS for case in cases(form)]
EVERY += [
    (Form(impl), case) for impl in IMPLEMENTATIONS for case in attention_cases() if impl != "triton" or case.dtype in (FLOAT32, FLOAT16)
]


def delta_cases(impl: str) -> list[deltas.Delta]:
    """Every variant and dtype of the delta rule: normalised keys, whatever follows a cut."""
    T, found = 100 if impl in deltas.NAMES else 40, []
    of_dtypes = (FLOAT64, FLOAT32, BFLOAT16, FLOAT16) if impl in deltas.NAMES else (FLOAT32, FLOAT16)
    for number, (variant, dtype) in enumerate(product(deltas.VARIANTS, of_dtypes)):
        of = deltas.Delta(variant, B=1, H=1, T=T, K=32, V=32, dtype=dtype, state=number % 2 == 0)
        found += [of, replace(of, gate="mixture")] if of.row.decay else [of]
        found += [replace(of, raw=True)] * (of.row.streams == 1 or of.row.raw != "")
        found += [replace(of, raw=True, bound=-5.0)] * of.row.bounded
        if impl != "triton_chunkwise":  # updates in place are triton_recurrent's, whole chunks of them the same kernels
            found += [deltas.PooledDelta(variant, B=1, H=1, T=T + 28 * (impl in deltas.NAMES), K=32, V=32, dtype=dtype, rows=1)]
    return found


EVERY += [(Form(impl), case) for impl in deltas.ALL for case in delta_cases(impl)]
SAMPLED = [pytest.param(number, *pair, marks=[pytest.mark.slow] * (number % 8 > 0)) for number, pair in enumerate(EVERY)]


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch):
    """Few sequences take the walks over scalar decays on Hopper; the CUDA kernels are emulated."""
    monkeypatch.setattr(scalars_sm90, "WALKS", 1)
    monkeypatch.setattr(launch, "run", emulated.run)


@pytest.mark.parametrize(("number", "form", "case"), SAMPLED, ids=str)
def test_outputs_before_a_cut_have_equal_bits(number, form, case):
    allowed = max((one.most for one in DECLARED if one.covers(form, case)), default=0.0)
    every = 1 if form.impl in ("cpu", "cuda") else 16  # compiled code is fast
    for pair, found in differences(form, case, every, number).items():
        assert found <= allowed, pair


@pytest.mark.parametrize("one", DECLARED, ids=lambda one: f"{one.form}-{one.dtypes[0]}-{one.decays[0]}")
def test_declared_exceptions_exist(one):
    """An exception that no call needs is not declared."""
    covered = ((form, case) for form, case in EVERY if one.covers(form, case) and case.operator is RECURRENCE)
    assert any(differences(form, case, 3, number) for number, (form, case) in enumerate(covered))
