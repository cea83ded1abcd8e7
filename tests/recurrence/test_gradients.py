"""Gradients against finite differences, second ones too; any subset of inputs; from either result alone."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from cases import NAMES, TRITON, Case, arithmetic, call, draw, problem_of, upstream
from sampling import every
from torch.utils._pytree import tree_leaves

import penstock as ps
from penstock.recurrence import chunkwise, reference
from penstock.recurrence.operators import FAMILY
from penstock.recurrence.variants import VARIANTS
from penstock.tokens import chunks

FLOAT64 = torch.float64
TAKE_FLOAT64 = [name for name in NAMES if name != "cpu"]
SMALL = [
    replace(Case(variant, B=1, T=3, H=2, K=2, V=2, dtype=FLOAT64), **options)
    for variant in VARIANTS
    for options in ({}, {"lengths": (2, 0, 1)}, {"reverse": True, "scale": 0.5}, {"state": False})
]
HELD = [(case, impl) for case in SMALL for impl in TAKE_FLOAT64]
SAMPLED = [pair for pair in HELD if pair[1] == "chunkwise" or pair[0].variant == "rwkv6"]
"""All variants by the implementation that second derivatives go through; by the others, whose gradients are autograd's, one."""
DERIVATIVES = [*SAMPLED, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in HELD if pair not in SAMPLED)]
TWO_CHUNKS = [
    replace(Case(variant, B=1, T=67, H=1, K=2, V=2, dtype=FLOAT64), **options)
    for variant in VARIANTS
    for options in ({}, {"lengths": (66, 0, 2)}, {"reverse": True, "state": False})
]


def as_function(case, impl):
    """The tensors of a case, and a function of them alone."""
    tensors = {name: x for name, x in draw(case).items() if x is not None}

    def function(*values):
        return tuple(call(case, dict(zip(tensors, values)), impl))

    return function, [x.requires_grad_() for x in tensors.values()]


@pytest.mark.parametrize(("case", "impl"), DERIVATIVES, ids=str)
def test_first_and_second_derivatives(case, impl):
    """The second are those of the chunkwise form, whatever computes the first."""
    assert torch.autograd.gradcheck(*as_function(case, impl))
    if case.state:
        assert torch.autograd.gradgradcheck(*as_function(case, impl), fast_mode=True)


@pytest.fixture
def chunkwise_forward(monkeypatch):
    """``chunkwise.forward`` as a function of the tensors of a case, in blocks of one chunk, and these tensors."""
    monkeypatch.setattr(chunks, "BLOCK", 1)

    def of(case):
        tensors = {name: x for name, x in draw(case).items() if x is not None}
        problem = problem_of(case, draw(case))
        return lambda *values: chunkwise.forward(problem.with_tensors(dict(zip(tensors, values)))), tuple(tensors.values())

    return of


def assert_near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=arithmetic(FLOAT64) * max(float(x.norm()) for x in tree_leaves(wanted)))


def stacked(tuples):
    return tuple(torch.stack(x) for x in zip(*tuples))


@pytest.mark.parametrize("case", every(2, TWO_CHUNKS), ids=str)
def test_jacobians_of_torch_func(case, chunkwise_forward):
    """``jacfwd``, ``jacrev`` and ``jvp`` equal autograd."""
    function, values = chunkwise_forward(case)
    every = tuple(range(len(values)))
    wanted = torch.autograd.functional.jacobian(function, values)
    assert_near(torch.func.jacfwd(function, every)(*values), wanted)
    assert_near(torch.func.jacrev(function, every)(*values), wanted)
    tangents = tuple(torch.linspace(-1, 1, x.numel(), dtype=FLOAT64).view(x.shape) for x in values)
    along = tuple(sum(torch.tensordot(d, x, x.dim()) for d, x in zip(row, tangents)) for row in wanted)
    found, derivatives = torch.func.jvp(function, values, tangents)
    assert_near(found, function(*values))
    assert_near(derivatives, along)


@pytest.mark.parametrize("case", TWO_CHUNKS, ids=str)
def test_gradients_of_torch_func(case, chunkwise_forward):
    """``grad``, ``vmap``, ``vmap`` of ``grad`` and ``hessian`` equal autograd."""
    function, values = chunkwise_forward(case)
    every = tuple(range(len(values)))

    def loss(*values):
        return sum(x.sin().sum() for x in function(*values))

    def wanted(*values):
        values = [x.clone().requires_grad_() for x in values]
        return torch.autograd.grad(loss(*values), values)

    assert_near(torch.func.grad(loss, every)(*values), wanted(*values))
    several = [tuple(factor * x for x in values) for factor in (1, 0.5, 0.1)]
    assert_near(torch.func.vmap(function)(*stacked(several)), stacked(function(*one) for one in several))
    assert_near(torch.func.vmap(torch.func.grad(loss, every))(*stacked(several)), stacked(wanted(*one) for one in several))
    hessian = torch.autograd.functional.hessian(lambda v: loss(*values[:2], v, *values[3:]), values[2])
    assert_near(torch.func.hessian(loss, 2)(*values), hessian)


def test_only_native_kernels_refuse_float64():
    """So the list above is complete."""
    case = SMALL[0]
    problem = problem_of(case, draw(case))
    assert [one.name for one in FAMILY.implementations if one.refuses(problem, "forward")] == ["cpu", "cuda", *TRITON]


@pytest.mark.parametrize("variant", VARIANTS)
def test_second_derivatives_of_the_native_kernels(variant):
    """Float32 in, chunkwise second derivatives: those of the oracle, |gradient| squared differentiated again."""
    case = Case(variant, T=9, K=8, V=8)

    def twice(dtype, run):
        tensors = {name: None if x is None else x.to(dtype).requires_grad_() for name, x in draw(case).items()}
        inputs = [x for x in tensors.values() if x is not None]
        first = torch.autograd.grad(run(tensors), inputs, [d.to(dtype) for d in upstream(case)], create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    wanted = twice(FLOAT64, lambda tensors: reference.exact(problem_of(case, tensors)))
    for found, exact in zip(twice(torch.float32, lambda tensors: call(case, tensors, "cpu")), wanted):
        assert (found.double() - exact).norm() <= 2e-6 * exact.norm()


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_subset_of_inputs(variant, impl):
    """One input's gradient does not depend on which others are wanted; the others get none."""
    case = Case(variant, T=6, K=4, V=4)

    def grads(wanted):
        tensors = {name: None if x is None else x.requires_grad_(name in wanted) for name, x in draw(case).items()}
        torch.autograd.backward(call(case, tensors, impl), upstream(case))
        return {name: x.grad for name, x in tensors.items() if x is not None}

    names = [name for name, x in draw(case).items() if x is not None]
    full = grads(names)
    for size in (1, 2):
        for subset in combinations(names, size):
            for name, grad in grads(subset).items():
                assert torch.equal(grad, full[name]) if name in subset else grad is None


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_both_results_add_up(variant, impl, packed):
    """Through the output alone plus through the final state alone is through both."""
    case = Case(variant, T=20, lengths=(7, 0, 13) if packed else None)

    def grads(through_output, through_state):
        tensors = {name: None if x is None else x.requires_grad_() for name, x in draw(case).items()}
        result = call(case, tensors, impl)
        wanted = [(x, d) for x, d, use in zip(result, upstream(case), (through_output, through_state)) if use]
        inputs = [x for x in tensors.values() if x is not None]
        results, d_results = zip(*wanted)
        return torch.autograd.grad(results, inputs, d_results)

    for both, one, other in zip(grads(True, True), grads(True, False), grads(False, True)):
        torch.testing.assert_close(one + other, both, rtol=0, atol=2e-6 * float(both.norm() + one.norm() + other.norm()))


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_query_and_bonus_have_no_gradient_from_the_final_state(variant, impl):
    case = Case(variant, T=8)
    tensors = {name: None if x is None else x.requires_grad_() for name, x in draw(case).items()}
    call(case, tensors, impl).final_state.sum().backward()
    assert tensors["q"].grad.eq(0).all()
    assert tensors["u"] is None or tensors["u"].grad.eq(0).all()
    assert tensors["k"].grad.ne(0).any()
    assert tensors["initial_state"].grad.ne(0).any()


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_upstream_gradients_may_have_any_layout(variant, impl):
    """Expanded ones (of a sum) and transposed ones give what contiguous ones give."""
    case = Case(variant, T=9)
    shape, state_shape = ([case.sizes[axis] for axis in axes] for axes in ("BTHV", "NHKV"))
    swapped = torch.randn(shape[0], shape[3], shape[2], shape[1]).transpose(1, 3)
    for d_output, d_state in (
        (torch.ones(()).expand(shape), torch.ones(()).expand(state_shape)),
        (swapped, torch.randn(state_shape).transpose(2, 3).contiguous().transpose(2, 3)),
    ):
        found, wanted = [], []
        for grads, layout in ((found, lambda x: x), (wanted, torch.Tensor.contiguous)):
            tensors = {name: x.requires_grad_() for name, x in draw(case).items() if x is not None}
            result = call(case, tensors, impl)
            grads += torch.autograd.grad(result, list(tensors.values()), [layout(d_output), layout(d_state)])
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-6 * float(other.norm()))


def test_normalised_linear_attention():
    """Through the feature map and the division."""
    q, k, v = (torch.randn(1, 4, 2, 2, dtype=FLOAT64, requires_grad=True) for _ in range(3))
    state = torch.rand(1, 2, 2, 3, dtype=FLOAT64, requires_grad=True)

    def function(q, k, v, state):
        return tuple(ps.linear_attention(q, k, v, feature_map="elu+1", normalize=True, initial_state=state, output_final_state=True))

    assert torch.autograd.gradcheck(function, (q, k, v, state))
