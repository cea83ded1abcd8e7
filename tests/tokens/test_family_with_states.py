"""A family of recurrences declared in a test on ``penstock.tokens``: the gated delta rule, over sequences and in place.

S = exp(g_t) S_{t-1};  S_t = S + b_t k_t^T (v_t - k_t S);  o_t = scale q_t S_t
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.bench.candidates import ours
from penstock.bench.measure import measure
from penstock.call import families
from penstock.call.declaration import Argument, Signature
from penstock.call.dispatch import Family
from penstock.call.families import Registered, Trial
from penstock.call.implementation import Implementation
from penstock.call.operator import Operator
from penstock.tokens import declaration as tokens
from penstock.tokens.distributions import channel_decays
from penstock.tokens.dtypes import state_dtype
from penstock.tokens.packing import cu_seqlens as packing
from penstock.tokens.packing import one_row
from penstock.tokens.pieces import CHUNK, advance_by
from penstock.tokens.pools import POOL, SLOTS, own_row
from penstock.tokens.problem import InPlace, OverSequences, TokenProblem
from penstock.tokens.shape import Shape
from penstock.tokens.sharing import groups
from penstock.verify import verify
from penstock.verify.inputs import inputs as drawn


class Delta(TokenProblem):
    """What both operators share."""

    b: Tensor  # [B, T, H]


class DeltaRule(Delta, OverSequences):
    """A call over whole sequences."""


class DeltaInPlace(Delta, InPlace):
    """A call that updates states in place."""


def forward(p: DeltaRule, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Token by token, in float32 or, for float64 inputs and the oracle, in float64."""
    p, dtype = p.forward_in_time(), dtype or state_dtype(p.q.dtype)
    q, k, v, b, g = (x.to(dtype) for x in (p.q, p.k, p.v, p.b, p.gate))
    states = q.new_zeros(p.state_shape) if p.initial_state is None else p.initial_state.to(dtype)
    outputs, finals = [], []
    for n, ((begin, end), S) in enumerate(zip(p.spans(), states)):
        row = 0 if p.cu_seqlens is not None else n
        for t in range(begin, end):
            S = g[row, t].exp()[..., None] * S
            error = v[row, t] - (k[row, t][..., None] * S).sum(1)
            S = S + (b[row, t][:, None] * k[row, t])[..., None] * error[:, None]
            outputs.append(p.scale * (q[row, t][..., None] * S).sum(1))
        finals.append(S)
    output = torch.stack(outputs).view(p.v.shape) if outputs else torch.zeros_like(p.v)
    return p.back_in_time(output.to(p.v.dtype), torch.stack(finals).to(state_dtype(p.q.dtype)))


class Result(NamedTuple):
    output: Tensor
    final_state: Tensor | None


class Row(NamedTuple):
    name: str
    decay: str


def arguments(row: Row) -> tuple[Argument, ...]:
    q, k, v = tokens.queries_keys_values()
    return (
        q,
        replace(k, draw=lambda x: torch.nn.functional.normalize(x, dim=-1)),  # else states grow without bound
        v,
        tokens.decay(row.decay, "", False, False, "A decay has the heads of v."),
        Argument("b", "B T H", gradient=True, draw=torch.sigmoid),
        packing("T"),
    )


ROWS = (Row("delta_rule_by_head", "B T H"), Row("delta_rule_by_channel", "B T H K"))
RULES = (one_row, groups("q"))
OPTIONS = (tokens.scale(lambda sizes, row: sizes["K"] ** -0.5), tokens.REVERSE, tokens.OUTPUT_FINAL_STATE)
RESULTS = (tokens.OUTPUT, tokens.FINAL_STATE)
exact = partial(forward, dtype=torch.float64)
FAMILY = Family(
    Implementation("loop", "token loop", forward, advance=partial(advance_by, forward)),
    Implementation("reference", "token loop in float64", exact, advance=partial(advance_by, exact)),
)
SEQUENCES = Operator(
    "delta_rule", DeltaRule,
    [Signature(row.name, (*arguments(row), tokens.INITIAL_STATE), row, rules=RULES, layout=("T", "H"), **tokens.AXES) for row in ROWS],
    RESULTS, FAMILY, OPTIONS, lambda p: forward(p.whole),
)  # fmt: skip
DeltaInPlace.sequences = SEQUENCES
IN_PLACE = Operator(
    "delta_rule_in_place", DeltaInPlace,
    [Signature(f"advance({row.name!r})", (*arguments(row), SLOTS, POOL), row, rules=(*RULES, own_row), **tokens.AXES) for row in ROWS],
    RESULTS[:1], FAMILY, OPTIONS[:1],
)  # fmt: skip


def delta_rule(q, k, v, g, b, *, scale=None, initial_state=None, output_final_state=True, cu_seqlens=None, reverse=False, impl="auto"):
    name = ROWS[g.dim() - 3].name
    return Result(*SEQUENCES(name, (q, k, v, g, b, cu_seqlens, initial_state), (scale, reverse, output_final_state), impl))


def advance(q, k, v, g, b, *, state, slots=None, cu_seqlens=None, impl="auto"):
    name = ROWS[g.dim() - 3].name
    return IN_PLACE(f"advance({name!r})", (q, k, v, g, b, cu_seqlens, slots, state), (None,), impl)[0]


SIZES = {"B": 2, "N": 2, "T": 70, "G": 2, "H": 2, "K": 5, "V": 3}
TRIALS = (
    Trial(SEQUENCES, SIZES, (None, False, True)),
    Trial(IN_PLACE, SIZES | {"B": 3, "N": 3, "T": 67, "P": 4}, (None,), {"slots": (3, -1, 0)}),
)


def draw(variant, sizes, random, gates):
    q, k, v = (torch.randn([sizes[axis] for axis in axes], dtype=torch.float64, generator=random) for axes in ("BTHK", "BTHK", "BTHV"))
    g = channel_decays(gates or "mu-3", sizes, random)
    k = torch.nn.functional.normalize(k, dim=-1)
    return {"q": q, "k": k, "v": v, "g": g if variant == ROWS[1].name else g.mean(-1), "b": torch.rand_like(g[..., 0])}


def step(variant, *given, state, impl):
    return advance(*given, state=state, impl=impl)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Known to tools in these tests only."""
    monkeypatch.setattr(families, "_known", families._known.copy())
    functions = {row.name: delta_rule for row in ROWS} | {"delta_rule_in_place": advance}
    families.register(Registered("delta in a test", FAMILY, functions, TRIALS, "token loop", draw=draw, step=step))


def inputs(T=9, B=1, G=2, by_channel=True, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    sizes = (B, T, G, 4), (B, T, G, 4), (B, T, 2, 3), (B, T, 2, 4)[: 3 + by_channel], (B, T, 2)
    q, k, v, g, b = (torch.randn(size, dtype=torch.float64, generator=random).to(dtype) for size in sizes)
    return q, k / k.norm(dim=-1, keepdim=True), v, -g.abs(), b.sigmoid()


@pytest.mark.parametrize("by_channel", [False, True])
def test_equals_the_formula_with_matrices(by_channel):
    """S_t = (1 - b k^T k) diag(exp(g)) S_{t-1} + b k^T v."""
    q, k, v, g, b = inputs(by_channel=by_channel)
    output, state = delta_rule(q, k, v, g, b, scale=0.5)
    for h in range(2):
        S = torch.zeros(4, 3, dtype=torch.float64)
        for t in range(9):
            row = k[0, t, h][None]
            decay = g[0, t, h].exp().expand(4).diag()
            S = (torch.eye(4) - b[0, t, h] * row.T @ row) @ decay @ S + b[0, t, h] * row.T @ v[0, t, h][None]
            torch.testing.assert_close(output[0, t, h], 0.5 * q[0, t, h] @ S)
        torch.testing.assert_close(state[0, h], S)


def test_derivatives():
    given = [x.requires_grad_() for x in inputs(T=3, G=1)]
    assert torch.autograd.gradcheck(lambda *x: tuple(delta_rule(*x)), given)
    assert torch.autograd.gradgradcheck(lambda *x: tuple(delta_rule(*x)), given)
    assert torch.autograd.gradcheck(lambda *x: tuple(delta_rule(*x)), given, check_forward_ad=True, check_backward_ad=False)


def test_reversed_and_packed_sequences():
    given = inputs()
    backward = [x.flip(1) for x in given]
    torch.testing.assert_close(delta_rule(*given, reverse=True)[0], delta_rule(*backward)[0].flip(1))
    ends, state = torch.tensor([0, 2, 2, 9]), torch.randn(3, 2, 4, 3, dtype=torch.float64)
    for reverse in (False, True):
        output, final = delta_rule(*given, cu_seqlens=ends, initial_state=state, reverse=reverse)
        for n, (begin, end) in enumerate(pairwise(ends.tolist())):
            part = [x[:, begin:end] for x in given]
            alone = delta_rule(*part, initial_state=state[n : n + 1], reverse=reverse)
            assert torch.equal(output[:, begin:end], alone[0])
            assert torch.equal(final[n : n + 1], alone[1])


def test_shared_heads():
    q, k, v, g, b = inputs(G=1)
    repeated = delta_rule(q.repeat(1, 1, 2, 1), k.repeat(1, 1, 2, 1), v, g, b)
    assert torch.equal(delta_rule(q, k, v, g, b)[0], repeated[0])


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place(by_channel, dtype):
    """As over sequences; equal bits wherever a sequence is cut at multiples of the pieces; other rows keep theirs."""
    T = 2 * CHUNK + 5
    given, pool = inputs(T, by_channel=by_channel, dtype=torch.float32), torch.randn(4, 2, 4, 3).to(dtype)
    whole, cut = pool.clone(), pool.clone()
    slots = torch.tensor([2])
    output = advance(*given, state=whole, slots=slots)
    parts = [advance(*(x[:, begin:end] for x in given), state=cut, slots=slots) for begin, end in ((0, CHUNK), (CHUNK, T))]
    assert torch.equal(torch.cat(parts, 1), output)
    assert torch.equal(cut, whole)
    assert torch.equal(whole[[0, 1, 3]], pool[[0, 1, 3]])
    wanted = delta_rule(*given, initial_state=pool[2:3].float())
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output, wanted[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(whole[2:3].float(), wanted[1], rtol=tolerance, atol=tolerance)


def test_rules_of_tokens():
    q, k, v, g, b = inputs(dtype=torch.float32)
    with pytest.raises(ps.RangeError, match="delta_rule_by_channel: g must be a log decay"):
        delta_rule(q, k, v, -g, b)
    with pytest.raises(ps.ShapeError, match="v must be of shape"):
        delta_rule(q, k, v[:, :, :1], g[:, :, :1], b[:, :, :1])
    pool = torch.zeros(4, 2, 4, 3)
    with pytest.raises(ps.RangeError, match="slots must be below the 4 rows of state, got 4"):
        advance(q, k, v, g, b, state=pool, slots=torch.tensor([4]))
    with pytest.raises(ps.ShapeError, match="Pass slots= to address rows"):
        advance(q, k, v, g, b, state=pool)


def test_tools_know_it():
    found = list(verify.findings(TRIALS))
    assert not [one for one in found if one.failed]
    names = {"output", "final state", *(f"gradient of {name}" for name in ("q", "k", "v", "g", "b", "initial state"))}
    assert {one.result for one in found if one.error is not None} == names | {"output in place", "states in place"}
    assert {one.variant for one in found} == {row.name for row in ROWS}
    assert ps.explain("delta_rule_by_channel", *inputs()).forward == "loop"
    assert ps.explain("delta_rule_in_place", *inputs(), state=torch.zeros(1, 2, 4, 3)).chosen == {"advance": "loop"}


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd", "decode"])
@pytest.mark.parametrize("variant", [row.name for row in ROWS])
def test_benchmarks_time_it(variant, mode):
    """What they draw, compare with the oracle and time is found by the function's name."""
    assert variant in families.variants(drawn=True)
    x = drawn(variant, Shape(1, 1 if mode == "decode" else 20, 2, 4, 3))
    assert list(x.tensors) == ["q", "k", "v", "g", "b"]
    found = measure("small", x, mode, [ours("auto", x, mode), ours("loop", x, mode)], seconds=0.001)
    assert [one.candidate for one in found.timings] == ["auto (loop)", "loop"]
    pool = torch.zeros(1, 2, 4, 3)
    assert x.first(3).in_place(pool).function == f"advance({variant!r})"
