"""A family declared in a test, on ``penstock.call`` and ``penstock.tokens`` alone.

The frame provides validation, gradients, torch operators and transforms. Once it is registered, tools know it as they know the others.
"""

from dataclasses import replace
from io import StringIO
from typing import ClassVar

import contract
import pytest
import torch
from rich.console import Console
from torch import Tensor

import penstock as ps
from penstock.bench.report import print_findings
from penstock.call import families
from penstock.call.declaration import Argument, Option, Result, Signature
from penstock.call.dispatch import Family
from penstock.call.families import Registered, Trial
from penstock.call.implementation import Implementation, Upstream
from penstock.call.operator import Operator, explain
from penstock.call.problem import Problem
from penstock.tokens.decays import log_decay
from penstock.tokens.dtypes import state_dtype
from penstock.tokens.packing import cu_seqlens as packing
from penstock.tokens.packing import one_row, ranges
from penstock.verify import verify


class Sum(Problem):
    """y_t = exp(g_t) y_{t-1} + x_t, from y_0, in each packed sequence."""

    x: Tensor
    g: Tensor
    cu_seqlens: Tensor | None
    start: Tensor | None
    last: bool


def scan(p: Sum, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Token by token, differentiable, in this dtype."""
    spans = [(n, 0, p.sizes["T"]) for n in range(p.sizes["N"])]
    if p.cu_seqlens is not None:
        spans = [(0, begin, end) for begin, end in ranges(p.cu_seqlens)]
    x, g = p.x.to(dtype), p.g.to(dtype)
    start = x.new_zeros(p.sizes["N"], p.sizes["C"]) if p.start is None else p.start.to(dtype)
    y, finals = [], []
    for (row, begin, end), state in zip(spans, start):
        for t in range(begin, end):
            state = g[row, t].exp() * state + x[row, t]
            y.append(state)
        finals.append(state)
    return torch.stack(y).view(x.shape), torch.stack(finals)


def loop(p: Sum) -> tuple[Tensor, Tensor]:
    y, last = scan(p, state_dtype(p.x.dtype))
    return y.to(p.x.dtype), last


def exact(p: Sum) -> tuple[Tensor, Tensor]:
    """In float64, rounded once: the oracle."""
    y, last = scan(p, torch.float64)
    return y.to(p.x.dtype), last.to(state_dtype(p.x.dtype))


def backward(p: Sum, upstream: Upstream) -> list[Tensor | None]:
    """By hand, for one sequence a row."""
    dtype = state_dtype(p.x.dtype)
    d, g = upstream.gradients[0].to(dtype), p.g.to(dtype)
    d_last = upstream.gradients[1]
    y = scan(p, dtype)[0]
    total = torch.zeros_like(d[:, 0]) if d_last is None else d_last.to(dtype)
    dx, dg = torch.empty_like(y), torch.empty_like(y)
    for t in reversed(range(p.sizes["T"])):
        before = y[:, t - 1] if t else torch.zeros_like(y[:, 0]) if p.start is None else p.start.to(dtype)
        total = total + d[:, t]
        dx[:, t], dg[:, t] = total, total * before * g[:, t].exp()
        total = total * g[:, t].exp()
    return [dx.to(p.x.dtype), dg.to(p.g.dtype), None if p.start is None else total.to(p.start.dtype)]


ARGUMENTS = (
    Argument("x", "B T C", gradient=True),
    Argument("g", "B T C", like="x", gradient=True, values=log_decay, draw=torch.nn.functional.logsigmoid),
    packing("T"),
    Argument("start", "N C", required=False, gradient=True),
)
SIGNATURE = Signature("gated_sum", ARGUMENTS, nonempty="C", counts="B T N", folded="C", rules=(one_row,))
FAMILY = Family(
    Implementation(
        "by_hand", "backward written out", loop, backward, refuses=lambda p, mode: "packed" * (p.cu_seqlens is not None) or None
    ),
    Implementation("loop", "token loop", loop),
    Implementation("reference", "token loop in float64, the oracle", exact),
)
RESULTS = (Result("y", "B T C"), Result("last", "N C", dtype=state_dtype, wanted="last"))
SUM = Operator("gated_sum", Sum, [SIGNATURE], RESULTS, FAMILY, (Option("last", "bool"),), loop)


def gated_sum(x, g, *, cu_seqlens=None, start=None, last=False, impl="auto"):
    return SUM("gated_sum", (x, g, cu_seqlens, start), (last,), impl)


TRIAL = Trial(SUM, {"B": 2, "N": 2, "T": 70, "C": 3}, (True,))


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Known to tools in these tests only."""
    monkeypatch.setattr(families, "_known", families._known.copy())
    families.register(Registered("sums", FAMILY, {"gated_sum": gated_sum}, (TRIAL,), "token loop of sums"))


# Everything below follows from the declaration.


def inputs(dtype=torch.float64, **options):
    random = torch.Generator().manual_seed(0)
    x, g, start = (torch.randn(size, dtype=torch.float64, generator=random).to(dtype) for size in ((2, 5, 3), (2, 5, 3), (2, 3)))
    return {"x": x, "g": -g.abs(), "start": start, **options}


def test_results_and_gradients():
    given = {name: x.requires_grad_() for name, x in inputs().items()}
    for impl in ("auto", "by_hand", "loop"):
        y, last = gated_sum(**given, last=True, impl=impl)
        torch.testing.assert_close(y[:, -1], last)
        assert gated_sum(**given, impl=impl)[1] is None
        run = lambda x, g, start, impl=impl: tuple(gated_sum(x, g, start=start, last=True, impl=impl))  # noqa: E731
        assert torch.autograd.gradcheck(run, [*given.values()])
        assert torch.autograd.gradgradcheck(run, [*given.values()])


def test_in_torch():
    given = inputs()
    x, g, start = (x.clone().requires_grad_() for x in given.values())
    torch.library.opcheck(torch.ops.penstock.gated_sum.default, (x, g, None, start, "gated_sum", True, "auto"))
    compiled = torch.compile(lambda x, g: gated_sum(x, g)[0].sum(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(given["x"], given["g"]), gated_sum(given["x"], given["g"])[0].sum())


def test_transforms():
    given = inputs()
    run = lambda x: gated_sum(x, given["g"])[0]  # noqa: E731
    wanted = torch.autograd.functional.jacobian(run, given["x"])
    torch.testing.assert_close(torch.func.jacrev(run)(given["x"]), wanted)
    torch.testing.assert_close(torch.func.jacfwd(run)(given["x"]), wanted)
    stacked = torch.stack([given["x"], 2 * given["x"]])
    torch.testing.assert_close(torch.func.vmap(run)(stacked), torch.stack([run(x) for x in stacked]))


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"x": torch.zeros(2, 5, dtype=torch.float64)}, ps.ShapeError, "x must be of shape [B,T,C], got [2, 5]"),
        ({"g": torch.zeros(2, 5, 4)}, ps.InvalidArgument, "g must be of shape [B,T,C] = [2, 5, 3], got [2, 5, 4]"),
        ({"g": torch.ones(2, 5, 3, dtype=torch.float64)}, ps.RangeError, "g must be a log decay"),
        ({"start": torch.zeros(2, 3, dtype=torch.int64)}, ps.DtypeError, "start must be float16 or bfloat16 or float32 or float64"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ps.ShapeError, "B must be 1 with cu_seqlens, got 2"),
        ({"last": 1}, ps.DtypeError, "last must be True or False, got 1 of type int"),
        ({"impl": "fast"}, ps.RangeError, "impl must be one of auto, by_hand, loop, reference, got 'fast'"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_errors(changed, kind, said):
    with pytest.raises(kind) as found:
        gated_sum(**inputs(**changed))
    assert f"gated_sum: {said}" in str(found.value)


def test_explained():
    x, g = torch.zeros(1, 5, 3), torch.zeros(1, 5, 3)
    packed = explain(gated_sum, x, g, cu_seqlens=torch.tensor([0, 2, 5]))
    assert (packed.forward, packed.backward) == ("loop", "loop")
    assert "by_hand          forward   refuses: packed" in str(packed)
    assert explain(gated_sum, x, g).forward == "by_hand"


def test_tools_know_it():
    x, g = torch.zeros(1, 5, 3), torch.zeros(1, 5, 3)
    assert ps.explain("gated_sum", x, g).forward == "by_hand"
    assert [one.name for one in ps.implementations("gated_sum")] == ["by_hand", "loop", "reference"]
    assert "gated_sum" in families.variants()
    with pytest.raises(ps.RangeError, match="dplr, gated_sum or a model, a layer or a mixer, got 'gated_product'"):
        ps.explain("gated_product", x, g)


@pytest.mark.parametrize("changed", [{"name": "sums"}, {"functions": {"gla": gated_sum}}], ids=["family", "function"])
def test_names_are_registered_once(changed):
    other = Registered(**{"name": "other", "family": FAMILY, "functions": {}, "trials": (), "oracle": ""} | changed)
    with pytest.raises(ps.RangeError, match="register: one must be a family whose name and names of functions are new, got"):
        families.register(other)


def test_check_compares_it_with_its_oracle(monkeypatch):
    """``verify`` draws its inputs from the declaration, and its table is one of the report's."""
    assert TRIAL in families.trials()
    found = list(verify.findings((TRIAL,)))
    ran = {(one.implementation, one.result) for one in found if one.error is not None}
    assert not [one for one in found if one.failed]
    assert ran == {
        (one.name, name) for one in FAMILY.implementations for name in ("y", "last", *(f"gradient of {x}" for x in ("x", "g", "start")))
    }
    console = Console(width=200, record=True, file=StringIO())
    print_findings(console, found)
    assert "against the float64 token loop of sums, on cpu" in console.export_text()
    wrong = replace(FAMILY.named("loop"), forward=lambda p: (loop(p)[0] + 1e-3, loop(p)[1]))
    monkeypatch.setattr(FAMILY, "implementations", (wrong, FAMILY.named("reference")))
    failed = [one for one in verify.findings((TRIAL,), (torch.float32,)) if one.failed]
    assert {(one.implementation, one.result) for one in failed} == {("loop", "y")}


class Case:
    """A call for the contract suite."""

    operator: ClassVar = SUM
    function, options = "gated_sum", (True,)

    def __init__(self, dtype, packed):
        self.dtype, self.packed = dtype, packed

    def tensors(self, device="cpu"):
        given = inputs(self.dtype)
        if self.packed:
            given |= {"x": given["x"][:1], "g": given["g"][:1], "cu_seqlens": torch.tensor([0, 2, 5])}
        return {name: given.get(name) for name in SUM.names}

    def upstream(self, device="cpu"):
        y = self.tensors()["x"].sin()
        return y, torch.ones(2, 3, dtype=state_dtype(self.dtype))

    def call(self, tensors, impl):
        return gated_sum(**tensors, last=True, impl=impl)

    def check(self, found, impl, device="cpu"):
        double = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in self.tensors().items()}
        wanted = contract.run(self, double, tuple(d.double() for d in self.upstream()), "reference")
        for name, x in wanted.items():
            tolerance = 2e-6 + (torch.finfo(found[name].dtype).eps / 2 if found[name].dtype.itemsize == 2 else 0)
            assert (found[name].double() - x).abs().max() <= tolerance * x.abs().max(), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=contract.shortened)
@pytest.mark.parametrize("impl", [one.name for one in FAMILY.implementations])
def test_the_contract_holds(impl, dtype, packed):
    contract.check_contract(Case(dtype, packed), impl)


@pytest.mark.parametrize("kind", contract.LAZY)
@pytest.mark.parametrize("impl", contract.takers(Case(torch.float32, False)))
def test_lazy_tensors_equal_tensors_in_memory(impl, kind):
    contract.check_lazy(Case(torch.float32, False), impl, kind)
