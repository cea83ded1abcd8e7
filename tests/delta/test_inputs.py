"""Raw inputs: their gradients, in float32 and against finite differences; where the stage runs; which combinations are refused."""

from dataclasses import replace

import pytest
import torch
from contract import measured
from deltas import FAMILY, NAMES, TRITON, VARIANTS, Delta, oracle

import penstock as ps
from penstock.call.implementation import Implementation, Upstream
from penstock.delta import chunkwise, inputs
from penstock.delta.gradients import Gradients
from penstock.delta.inputs import always_groups, of_every_head, prepared
from penstock.delta.operators import DELTA
from penstock.tokens.decays import FASTEST

FLOAT64 = torch.float64
TAKE_FLOAT64 = [name for name in NAMES if name != "cpu"]
GATED = [name for name, row in VARIANTS.items() if row.raw]
SMALL = Delta("", B=1, T=3, H=2, G=1, K=2, V=2, dtype=FLOAT64)
TWO_CHUNKS = Delta("", B=1, T=67, H=1, K=2, V=2, dtype=FLOAT64)
CASES = [
    *(replace(SMALL, variant=variant, **options) for variant in VARIANTS for options in ({}, {"lengths": (2, 0, 1)}, {"state": False})),
    *(replace(SMALL, variant=variant, removed=2) for variant in ("rwkv7", "dplr")),
    *(replace(SMALL, variant=variant, raw=True) for variant in ("delta_rule", *GATED)),
    replace(SMALL, variant="kda", raw=True, bound=-5.0, negative=True),
    *(replace(TWO_CHUNKS, variant=variant) for variant in ("gated_delta_rule", "kda", "rwkv7")),
]


def as_function(case, impl):
    """The tensors of a case, and a function of them alone."""
    tensors = {name: x for name, x in case.tensors().items() if x is not None}
    leaves = {name: x.requires_grad_() for name, x in tensors.items() if x.is_floating_point()}

    def function(*values):
        return tuple(case.call(tensors | dict(zip(leaves, values)), impl))

    return function, [*leaves.values()]


@pytest.mark.parametrize("impl", TAKE_FLOAT64)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_first_and_second_derivatives(case, impl):
    """The second are those of the chunkwise form, whatever computes the first."""
    assert torch.autograd.gradcheck(*as_function(case, impl), fast_mode=case.T > 3)
    assert torch.autograd.gradgradcheck(*as_function(case, impl), fast_mode=True)


@pytest.mark.parametrize("variant", GATED)
def test_derivatives_of_saturated_gates_and_logits(variant):
    """Where sigmoid(x) rounds to 1 in float32, its derivative does not round to 0."""
    case = Delta(variant, B=1, T=4, H=1, K=2, V=2, raw=True)
    tensors = {name: x for name, x in case.drawn().items() if x is not None}
    tensors |= {name: x + 18 for name, x in tensors.items() if name in ("raw", "beta")}
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    double = {name: x.double().requires_grad_() for name, x in tensors.items()}
    found, exact = (
        torch.autograd.grad(case.call(given, impl).output.sum(), [given[name] for name in given if name in ("raw", "beta")])
        for given, impl in ((leaves, "chunkwise"), (double, "reference"))
    )
    for x, wanted in zip(found, exact):
        assert (x.double() - wanted).norm() <= 1e-5 * wanted.norm()


BOUNDS = [*((variant, None) for variant in GATED), ("kda", -5.0)]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # NumPy's, of values in the interpreter that masks discard
@pytest.mark.parametrize("impl", [*NAMES, *TRITON])
@pytest.mark.parametrize(("variant", "bound"), BOUNDS)
def test_infinite_gates_are_large_gates(variant, bound, impl):
    """With -inf nothing is forgotten, as callers mark padding, with inf everything, or what the bound allows. All gradients are finite."""
    case, found = Delta(variant, B=1, T=6, H=2, K=4, V=2, raw=True, bound=bound), []
    for large in (torch.inf, 1e4):
        tensors = {name: None if x is None else x.clone() for name, x in case.tensors().items()}
        tensors["raw"][:, 2], tensors["raw"][:, 4, 0] = -large, large
        leaves = {name: x.requires_grad_() for name, x in tensors.items() if x is not None}
        results = case.call(tensors, impl)
        gradients = torch.autograd.grad([x.sin().sum() for x in results], list(leaves.values()), allow_unused=True, materialize_grads=True)
        found.append([*results, *gradients])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("variant", "bound"), BOUNDS)
def test_decays_of_infinite_gates_are_limits(variant, bound):
    """In exact numbers, however small the rate exp(A_log) is."""
    case = Delta(variant, B=1, T=4, H=2, K=4, V=2, raw=True, bound=bound, biased=False)
    tensors = case.tensors()
    if tensors["A_log"] is not None:
        tensors["A_log"] = torch.tensor([-torch.inf, 2.0])
    tensors["raw"][:, 1], tensors["raw"][:, 2] = -torch.inf, torch.inf
    found = inputs.log_decay(DELTA.checked(variant, [tensors.get(name) for name in DELTA.names], case.options), torch.float32).exp()
    limit = FASTEST if variant == "rwkv7" else -torch.inf if bound is None else bound
    assert (found[:, 1] == 1).all()
    if tensors["A_log"] is not None:  # a rate of 0
        assert torch.equal(found[:, 0, 0], torch.full_like(found[:, 0, 0], 0.0 if bound is None else bound / 2).exp())
    assert torch.equal(found[:, 2], torch.full_like(found[:, 2], limit).exp())


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # NumPy's, of values in the interpreter that masks discard
@pytest.mark.parametrize("impl", [*NAMES, *TRITON])
@pytest.mark.parametrize(("variant", "bound"), [one for one in BOUNDS if VARIANTS[one[0]].raw == "softplus"])
def test_rates_and_gates_of_any_size(variant, bound, impl):
    """No NaN, whatever A_log and the gates are, in values and in first and second derivatives."""
    largest = torch.finfo(torch.float32).max
    gates = torch.tensor([0.0, torch.inf, -torch.inf, largest, -largest, 100.0, -100.0, 1.0])
    case = Delta(variant, B=1, T=8, H=2, K=4, V=2, raw=True, bound=bound, biased=False)
    for rate in (-torch.inf, -120.0, -85.0, -20.0, 0.3, 20.0, 85.0, 120.0, torch.inf):
        tensors = {name: None if x is None else x.clone() for name, x in case.tensors().items()}
        tensors["A_log"] = torch.tensor([rate, 0.3])
        tensors["raw"].copy_(gates.view(1, 8, *[1] * (tensors["raw"].dim() - 2)))
        if rate == -torch.inf:
            tensors["raw"].fill_(1.0)
        names = [name for name, x in tensors.items() if x is not None]
        leaves = [tensors[name].requires_grad_() for name in names]
        results = case.call(tensors, impl)
        first = torch.autograd.grad([x.sin().sum() for x in results], leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), leaves, allow_unused=True, materialize_grads=True)
        if abs(rate) < 30:
            assert all(x.isfinite().all() for x in (*results, *first, *second)), rate
        else:
            assert not any(x.isnan().any() for x in (*results, *first)), rate
        if abs(rate) < 30 or abs(rate) > 100:
            wanted = case.call(tensors, "reference")
            (dA,) = torch.autograd.grad([x.sin().sum() for x in wanted], tensors["A_log"])
            for one, other in zip((*results, first[names.index("A_log")]), (*wanted, dA)):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_sums_of_the_norm_have_one_order():
    """They do not depend on the number of tokens, nor on strides."""
    x = torch.randn(3, 50, 4, 37)
    whole = inputs.normalized(x)
    assert torch.equal(inputs.normalized(x[1:2, 7:8].contiguous()), whole[1:2, 7:8])
    assert torch.equal(inputs.normalized(x.transpose(1, 2).contiguous().transpose(1, 2)), whole)
    wanted = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert (whole - wanted).norm() <= 1e-7 * wanted.norm()


@pytest.mark.parametrize("impl", NAMES)
def test_parameters_of_gates_in_16_bits(impl):
    """Their gradients are summed in float32 and rounded once."""
    case = Delta("kda", B=2, T=130, H=2, K=8, V=8, raw=True, dtype=torch.bfloat16)
    found, wanted = measured(case, impl), oracle(case)
    for name in ("dA_log", "ddt_bias"):
        assert found[name].dtype == torch.bfloat16
        assert float((found[name].double() - wanted[name].value).norm()) <= (2**-9 + 1e-5) * wanted[name].size


def canonical_only(**options):
    """An implementation of canonical problems, and the problems that it gets."""
    seen = []

    def forward(p):
        seen.append(p)
        return chunkwise.canonical_forward(of_every_head(p))

    def backward(p, upstream):
        seen.append((p, upstream.wanted))
        return chunkwise.canonical_backward(of_every_head(p), upstream)

    return prepared(Implementation("kernels", "for a test", forward, backward), **options), seen


@pytest.mark.parametrize("raw", [False, True])
def test_implementations_get_canonical_problems(raw, monkeypatch):
    """Log decays, beta in float32, q and k rounded to their dtype and repeated for all heads; equal calls make one problem."""
    one, seen = canonical_only()
    monkeypatch.setattr(FAMILY, "implementations", (one, *FAMILY.implementations))
    case = Delta("kda", B=1, T=5, H=4, G=2, K=4, V=4, raw=raw, dtype=torch.bfloat16, others=torch.float32)
    tensors = case.tensors()
    for _ in range(2):
        tensors["v"].requires_grad_()
        case.call(tensors, "kernels").output.sum().backward()
    forward, (backward, wanted) = seen[:2]
    for p in (forward, backward):
        assert p.raw is p.A_log is p.dt_bias is p.lower_bound is None
        assert not any((p.use_qk_l2norm, p.beta_logits, p.allow_neg_eigval))
        assert p.q.dtype == p.k.dtype == torch.bfloat16
        assert p.g.dtype == p.beta.dtype == torch.float32
        assert p.q.shape[2] == p.k.shape[2] == p.sizes["G"] == 4
        assert p.groups == 2
    assert wanted == (False, False, True, *[False] * 8)
    assert forward.seen is backward.seen is seen[2].seen


@pytest.mark.parametrize(("variant", "bound", "wanted"), [("rwkv7", None, FASTEST), ("kda", -5.0, -5.0), ("kda", None, None)])
def test_canonical_problems_have_the_bound_of_raw_gates(variant, bound, wanted):
    case = Delta(variant, B=1, T=5, H=1, K=4, V=4, raw=True, bound=bound)
    problems = [
        DELTA.checked(variant, [one.tensors().get(name) for name in DELTA.names], one.options)
        for one in (case, replace(case, raw=False, bound=None))
    ]
    raw, canonical = problems
    made = inputs.canonical(raw, inputs.computed(raw, wide=True))
    assert made.lower_bound == wanted
    assert canonical.lower_bound is None
    if wanted is not None:
        assert made.g.min() >= wanted
        alike = made.with_tensors({})
        alike.lower_bound = None
        assert made.seen is not alike.seen


def test_implementations_that_read_raw_inputs_and_groups(monkeypatch):
    one, seen = canonical_only(
        raw=lambda p, mode, d_output: None if mode == "forward" else "its backward kernel does not", groups=always_groups
    )
    case = Delta("gated_delta_rule", B=1, T=5, H=4, G=2, K=4, V=4, raw=True)
    problem = DELTA.checked(case.variant, [case.tensors().get(name) for name in DELTA.names], case.options)
    assert [verdict.reason for verdict in one.verdicts(problem, "forward")] == [None]
    assert [verdict.reason for verdict in one.verdicts(problem, "backward")] == ["its backward kernel does not", None]
    assert one.refusal(problem, "forward") is None
    monkeypatch.setattr(FAMILY, "implementations", (one, *FAMILY.implementations))
    found = DELTA.gradients(problem, "kernels", Upstream((torch.ones(1, 5, 4, 4), None)))
    assert seen[0][0].q.shape[2] == 2
    wanted = DELTA.gradients(problem, "chunkwise", Upstream((torch.ones(1, 5, 4, 4), None)))
    assert all(x is y is None or torch.allclose(x, y, atol=1e-5) for x, y in zip(found, wanted))


def test_explained():
    case = Delta("kda", T=5, raw=True)
    names = {"raw": "g"}
    given = {names.get(name, name): x for name, x in case.tensors().items() if x is not None}
    text = str(ps.explain("kda", **given, **{name: x for name, x in case.flags.items() if x}))
    assert "raw inputs: plain PyTorch before it: runs" in text
    assert "raw inputs: in its own pass: it computes" in text
    assert "raw inputs" not in str(
        ps.explain("kda", **{name: x for name, x in replace(case, raw=False).tensors().items() if x is not None})
    )


def test_backward_passes_that_read_raw_inputs(monkeypatch):
    """They return the gradients of raw inputs themselves."""
    case = Delta("kda", B=1, T=5, H=2, K=4, V=4, raw=True)
    problem = DELTA.checked(case.variant, [case.tensors().get(name) for name in DELTA.names], case.options)
    upstream = Upstream((torch.ones(1, 5, 2, 4), None))
    wanted = DELTA.gradients(problem, "chunkwise", upstream)
    by_name = dict(zip([one.name for one in DELTA.arguments if one.gradient], wanted))
    one = prepared(
        Implementation(
            "raw", "for a test", chunkwise.forward, lambda p, upstream: Gradients(*(by_name[name] for name in Gradients._fields))
        ),
        raw=lambda p, mode, d_output: None,
    )
    monkeypatch.setattr(FAMILY, "implementations", (one, *FAMILY.implementations))
    found = DELTA.gradients(problem, "raw", upstream)
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(found, wanted))
    assert sum(x is not None for x in found) == 8
