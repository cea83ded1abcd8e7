"""A family declared in a test: the frame provides validation, gradients, torch operators and transforms."""

import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.call.declaration import INDICES, Argument, Option, Result, Signature
from penstock.call.dispatch import Family
from penstock.call.implementation import Implementation, Upstream
from penstock.call.operator import Operator, explain
from penstock.call.problem import Problem
from penstock.tokens.decays import log_decay
from penstock.tokens.packing import offsets, one_row


class Sum(Problem):
    """y_t = exp(g_t) y_{t-1} + x_t, from y_0, in each packed sequence."""

    x: Tensor
    g: Tensor
    cu_seqlens: Tensor | None
    start: Tensor | None
    last: bool


def loop(p: Sum) -> tuple[Tensor, Tensor]:
    """Token by token, differentiable."""
    ends = [0, p.sizes["T"]] if p.cu_seqlens is None else p.cu_seqlens.tolist()
    start = p.x.new_zeros(p.sizes["N"], p.sizes["C"]) if p.start is None else p.start
    y, finals = [], []
    for n in range(p.sizes["N"]):
        row, state = (0, start[n]) if p.cu_seqlens is not None else (n, start[n])
        begin, end = (ends[n], ends[n + 1]) if p.cu_seqlens is not None else ends
        for t in range(begin, end):
            state = p.g[row, t].exp() * state + p.x[row, t]
            y.append(state)
        finals.append(state)
    return torch.stack(y).view(p.x.shape), torch.stack(finals)


def backward(p: Sum, upstream: Upstream) -> list[Tensor | None]:
    """By hand, for one sequence a row."""
    d, d_last = upstream.gradients
    y = loop(p)[0]
    total = torch.zeros_like(d[:, 0]) if d_last is None else d_last
    dx, dg = torch.empty_like(p.x), torch.empty_like(p.g)
    for t in reversed(range(p.sizes["T"])):
        before = y[:, t - 1] if t else torch.zeros_like(y[:, 0]) if p.start is None else p.start
        total = total + d[:, t]
        dx[:, t], dg[:, t] = total, total * before * p.g[:, t].exp()
        total = total * p.g[:, t].exp()
    return [dx, dg, None if p.start is None else total]


ARGUMENTS = (
    Argument("x", "B T C", gradient=True),
    Argument("g", "B T C", like="x", gradient=True, values=log_decay),
    Argument("cu_seqlens", "N+1", INDICES, required=False, values=offsets("T"), otherwise=("N", "B")),
    Argument("start", "N C", required=False, gradient=True),
)
SIGNATURE = Signature("gated_sum", ARGUMENTS, nonempty="C", counts="B T N", folded="C", rules=(one_row,))
FAMILY = Family(
    Implementation(
        "by_hand", "backward written out", loop, backward, refuses=lambda p, mode: "packed" * (p.cu_seqlens is not None) or None
    ),
    Implementation("loop", "token loop", loop),
)
SUM = Operator(
    "gated_sum", Sum, [SIGNATURE], (Result("y", "B T C"), Result("last", "N C", wanted="last")), FAMILY, (Option("last", "bool"),), loop
)


def gated_sum(x, g, *, cu_seqlens=None, start=None, last=False, impl="auto"):
    return SUM("gated_sum", (x, g, cu_seqlens, start), (last,), impl)


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
        ({"impl": "fast"}, ps.RangeError, "impl must be one of auto, by_hand, loop, got 'fast'"),
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
