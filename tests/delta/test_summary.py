"""``summary`` of the delta rule: the product of the transitions of tokens, and the state that they leave."""

import re
from dataclasses import replace

import deltas
import pytest
import torch
from deltas import VARIANTS, Delta
from torch import Tensor

import penstock as ps
from penstock.call.operator import explain
from penstock.delta.inputs import canonical, computed, is_raw, of_every_head

FLOAT32, FLOAT64 = torch.float32, torch.float64
OF = Delta("kda", T=70, H=2, K=8, V=12, dtype=FLOAT64)
CASES = [
    OF,
    replace(OF, T=5, state=False),
    replace(OF, T=0),
    replace(OF, B=0),
    replace(OF, T=33, H=4, G=2, strided=True),
    replace(OF, T=33, raw=True),
    replace(OF, T=9, K=20, V=3, dtype=FLOAT32),
    replace(OF, T=130, gate="mixture", dtype=FLOAT32),
    replace(OF, T=70, key="equal", beta=1.0),
]
NAMES = ("k", "v", "g", "beta", "a", "b", "raw", "A_log", "dt_bias", "initial_state")


def case_of(of: Delta, variant: str) -> Delta:
    """The case for a variant, without what it does not have."""
    row = VARIANTS[variant]
    return replace(of, variant=variant, beta=of.beta if row.streams == 1 else None, raw=of.raw and (row.raw != "" or row.streams == 1))


def drawn(case: Delta) -> dict[str, Tensor | None]:
    return {name: x for name, x in case.drawn().items() if name in NAMES}


def run(case: Delta, tensors: dict[str, Tensor | None], **options: object) -> ps.MatrixSummary:
    return ps.summary(case.variant, **deltas.named(case, tensors, "q", "g"), **options)


def literally(case: Delta, tensors: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """The state after the tokens and the product of their transitions, in float64, one token after another."""
    given = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in tensors.items()}
    p = case.operator.checked(case.variant, [given.get("k" if name == "q" else name) for name in case.operator.names], case.options)
    p = of_every_head(canonical(p, computed(p, wide=True)) if is_raw(p) else p)
    B, T, H, K = p.k.shape
    eye = torch.eye(K, dtype=FLOAT64)
    S, M = p.k.new_zeros(B, H, K, p.v.shape[3]) if p.initial_state is None else p.initial_state, eye.expand(B, H, K, K)
    gate = torch.zeros(B, T, H, K, dtype=FLOAT64) if p.gate is None else p.gate.expand(B, T, H, K)
    for t in range(T):
        D = torch.diag_embed(gate[:, t].exp())
        if p.beta is None:
            transition = D + p.b[:, t, :, :, None] * p.a[:, t, :, None, :]
            written = p.k[:, t]
        else:
            written = p.beta[:, t, :, None] * p.k[:, t]
            transition = (eye - written[..., None] * p.k[:, t, :, None, :]) @ D
        S, M = transition @ S + written[..., None] * p.v[:, t, :, None, :], transition @ M
    return S, M


def gradients(results: tuple[Tensor, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    ends = [x for x in results if x.requires_grad]
    found = torch.autograd.grad([x.sin().sum() for x in ends], list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found))


def check(of: Delta, variant: str, impl: str) -> None:
    case = case_of(of, variant)
    leaves = {name: x.detach().requires_grad_() for name, x in drawn(case).items() if x is not None}
    found, wanted = run(case, leaves, impl=impl), literally(case, leaves)
    exact = {"rtol": 1e-9, "atol": 1e-10} if case.dtype == FLOAT64 else {"rtol": 2e-5, "atol": 2e-5}
    for one, other in zip(found, wanted):
        assert one.dtype == case.dtype
        torch.testing.assert_close(one.double(), other, **exact)
    if found.state.requires_grad:
        of_leaves = gradients(wanted, leaves)
        for name, one in gradients(found, leaves).items():
            torch.testing.assert_close(one, of_leaves[name].to(one.dtype), **exact, msg=lambda text: f"d{name}\n{text}")  # noqa: B023


@pytest.mark.sampled("impl")
@pytest.mark.parametrize("impl", deltas.NAMES)
@pytest.mark.parametrize("of", CASES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_product_of_the_transitions(variant, of, impl):
    if impl == "cpu":
        of = replace(of, dtype=FLOAT32)
    check(of, variant, impl)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("impl", deltas.TRITON)
@pytest.mark.parametrize("variant", ["gated_delta_rule", "rwkv7"])
def test_equals_the_product_of_the_transitions_in_triton(variant, impl):
    check(Delta("kda", B=1, T=18, H=1, K=4, V=3), variant, impl)


@pytest.mark.parametrize("variant", [*VARIANTS, "gla", "retention"])
def test_summaries_of_parts_make_that_of_the_whole(variant):
    if variant in VARIANTS:
        case = case_of(replace(OF, state=False), variant)
        tensors = deltas.named(case, drawn(case), "q", "g")
    else:
        k, v, g = (torch.randn(2, 70, 2, 8, dtype=FLOAT64) for _ in range(3))
        tensors = {"k": k, "v": v} | ({"g": -g.abs()} if variant == "gla" else {})
    whole = ps.summary(variant, **tensors)
    parts = [ps.summary(variant, **{name: x[:, part] for name, x in tensors.items()}) for part in (slice(0, 33), slice(33, 70))]
    for one, other in zip(parts[0].then(parts[1]), whole):
        torch.testing.assert_close(one, other)
    state = torch.randn_like(whole.state)
    torch.testing.assert_close(parts[1].after(parts[0].after(state)), ps.summary(variant, **tensors, initial_state=state).state)


@pytest.mark.parametrize("variant", ["gla", "kda"])
def test_what_does_not_belong_to_a_summary_is_refused(variant):
    """States and later summaries; nothing is broadcast, and what has fewer bits is taken."""
    k, v, beta = torch.randn(2, 9, 3, 4), torch.randn(2, 9, 3, 5), torch.rand(2, 9, 3)

    def made(variant, heads=3):
        more = {"beta": beta[:, :, :heads]} if variant == "kda" else {}
        return ps.summary(variant, k[:, :, :heads], v[:, :, :heads], -k[:, :, :heads].abs(), **more)

    one, state = made(variant), torch.randn(2, 3, 4, 5)
    name = type(one).__name__
    assert torch.equal(one.after(state.bfloat16()), one.after(state.bfloat16().float()))
    for wrong, kind, message in (
        (state[:1], ps.ShapeError, "must be of shape [2, 3, 4, 5], got [1, 3, 4, 5]."),
        (state[..., :1], ps.ShapeError, "must be of shape [2, 3, 4, 5], got [2, 3, 4, 1]."),
        (torch.zeros(()), ps.ShapeError, "must be of shape [2, 3, 4, 5], got []."),
        (state.double(), ps.DtypeError, "must be torch.float32, got torch.float64."),
        (state.to("meta"), ps.DeviceError, "must be on cpu, got meta."),
        (5, ps.DtypeError, "must be a torch.Tensor, got 5 of type int."),
    ):
        with pytest.raises(kind, match=re.escape(f"{name}.after: state {message}")):
            one.after(wrong)
        if isinstance(wrong, torch.Tensor):
            with pytest.raises(kind, match=re.escape(f"{name}.then: later.state {message}")):
                one.then(one._replace(state=wrong))
    for later in (made("kda" if variant == "gla" else "gla"), None, tuple(one)):
        with pytest.raises(ps.DtypeError, match=re.escape(f"{name}.then: later must be a {name}, got ")):
            one.then(later)
    with pytest.raises(ps.ShapeError, match=re.escape(f"{name}.then: later.{one._fields[1]} must be of shape [2, 3, 4")):
        one.then(made(variant, heads=1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_states_go_back_by_the_transpose(variant):
    """As the documentation of ``summary`` says."""
    case = case_of(OF, variant)
    tensors = case.drawn()
    d_output, d_final = case.upstream()
    state = torch.zeros_like(tensors["initial_state"]).requires_grad_()
    output, final = case.call(tensors | {"initial_state": state}, "auto")
    (alone,) = torch.autograd.grad(output, state, d_output, retain_graph=True)
    (wanted,) = torch.autograd.grad((output, final), state, (d_output, d_final))
    torch.testing.assert_close(run(case, drawn(case)).matrix.mT @ d_final + alone, wanted)


def test_compiled_and_mapped_calls():
    case = replace(OF, T=9, raw=True)
    tensors = deltas.named(case, {name: x for name, x in drawn(case).items() if x is not None}, "q", "g")

    def function(k, v):
        return tuple(ps.summary("kda", **(tensors | {"k": k, "v": v})))

    k, v = tensors["k"], tensors["v"]
    wanted = function(k, v)
    assert all(torch.equal(*pair) for pair in zip(torch.compile(function, fullgraph=True, backend="eager")(k, v), wanted))
    mapped = torch.func.vmap(function)(torch.stack([k, 2 * k]), torch.stack([v, v]))
    for one, other in zip(mapped, wanted):
        torch.testing.assert_close(one[0], other)


def test_autocast_casts_keys_and_values():
    case = replace(OF, T=9, dtype=FLOAT32, raw=True, state=False)
    tensors = drawn(case)
    rounded = tensors | {name: tensors[name].bfloat16() for name in ("k", "v")}
    with torch.autocast("cpu", torch.bfloat16):
        found = run(case, tensors)
    assert all(torch.equal(*pair) for pair in zip(found, run(case, rounded)))
    assert found.state.dtype == found.matrix.dtype == FLOAT32


def test_errors_name_the_summary():
    k, g, beta = torch.randn(1, 5, 2, 4), -torch.rand(1, 5, 2, 4), torch.rand(1, 5, 2)
    for options, message in (
        ({"beta": beta, "reverse": True}, r"summary\('kda'\): reverse must be left out for kda, got True"),
        ({"beta": beta, "adjoint": True}, r"summary\('kda'\): adjoint must be left out for kda"),
        ({"beta": beta, "scale": 2.0}, r"summary\('kda'\): scale must be left out for kda"),
        ({"beta": beta, "lower_bound": -5.0}, r"summary\('kda'\): lower_bound must be None without A_log"),
        ({"beta": beta[:, :4]}, r"summary\('kda'\): beta must be of shape \[B,T,H\] = \[1, 5, 2\]"),
        ({}, r"summary\('kda'\): beta must be a torch.Tensor, got None"),
    ):
        with pytest.raises(ps.InvalidArgument, match=message):
            ps.summary("kda", k, k, g, **options)
    with pytest.raises(ps.RangeError, match=r"summary\('kda'\): g must be a log decay"):
        ps.summary("kda", k, k, -g, beta=beta)
    with pytest.raises(ps.RangeError, match=r"summary\('gla'\): beta must be left out for gla"):
        ps.summary("gla", k, k, g, beta=beta)
    with pytest.raises(ps.RangeError, match=r"summary: variant must be one of linear_attention, .*, dplr, got 'mamba'"):
        ps.summary("mamba", k, k)


def test_explained():
    k, g, beta = torch.randn(1, 5, 2, 4), -torch.rand(1, 5, 2, 4), torch.rand(1, 5, 2)
    assert explain(ps.summary, "kda", k, k, g, beta=beta).forward == ps.explain("kda", k, k, k, g, beta).forward
    assert ps.explain("summary", "gla", k, k, g).forward == "chunkwise"
