"""Public functions under torch.func: every transform equals autograd in float64; operators in place raise an error."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from attention import Attention
from cases import Case, arithmetic
from deltas import VARIANTS as OF_DELTA
from deltas import Delta
from pools import Pooled
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import penstock as ps
from penstock.recurrence.variants import VARIANTS

FLOAT64 = torch.float64
func = torch.func
TINY = Attention(B=1, Tq=3, Tk=3, H=2, G=1, D=2, dtype=FLOAT64)
CASES = [
    *(Case(variant, B=1, T=3, H=2, K=2, V=2, dtype=FLOAT64) for variant in VARIANTS),
    Case("rwkv6", lengths=(2, 0, 1), H=1, K=2, V=2, dtype=FLOAT64, state=False, reverse=True, scale=0.5),
    *(Delta(variant, B=1, T=3, H=2, K=2, V=2, dtype=FLOAT64) for variant in OF_DELTA),
    Delta("kda", B=1, T=3, H=2, K=2, V=2, dtype=FLOAT64, raw=True, bound=-5.0),
    Delta("gated_delta_rule", lengths=(2, 0, 1), H=2, G=1, K=2, V=2, dtype=FLOAT64, state=False, raw=True, scale=0.5),
    TINY,
    replace(TINY, window=2, causal=False, scale=-0.3),
    replace(TINY, lengths=((1, 2), (2, 1)), causal=False),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@cache
def as_function(case):
    """The public function of the differentiable tensors of a case alone, and these tensors."""
    tensors = case.tensors()
    names = [one.name for one in case.operator.arguments if one.gradient and tensors[one.name] is not None]

    def function(*values):
        return tuple(case.call(tensors | dict(zip(names, values)), "auto"))

    return function, tuple(tensors[name] for name in names)


def loss_of(case):
    function, values = as_function(case)
    return lambda *values: sum(x.sin().sum() for x in function(*values)), values


def gradients(loss, values):
    """By autograd."""
    leaves = [x.clone().requires_grad_() for x in values]
    return torch.autograd.grad(loss(*leaves), leaves)


def second(loss, values):
    """The gradient of the first input's gradient."""
    leaves = [x.detach().requires_grad_() for x in values]
    first = torch.autograd.grad(loss(*leaves), leaves[0], create_graph=True)[0]
    return torch.autograd.grad(first.sin().sum(), leaves, materialize_grads=True, allow_unused=True)


def assert_near(found, wanted):
    size = max(float(x.norm()) for x in tree_leaves(wanted))
    torch.testing.assert_close(found, wanted, rtol=0, atol=100 * arithmetic(FLOAT64) * size)


def along(case):
    """A direction in the space of the arguments."""
    return tuple(torch.linspace(-1, 1, x.numel(), dtype=FLOAT64).view(x.shape) for x in as_function(case)[1])


@cache
def jacobian(case):
    """By autograd: for each result, one tensor an argument."""
    return torch.autograd.functional.jacobian(*as_function(case))


def derivatives_along(case):
    return tuple(sum(torch.tensordot(d, x, x.dim()) for d, x in zip(row, along(case))) for row in jacobian(case))


@every_case
def test_jacobians(case):
    function, values = as_function(case)
    every = tuple(range(len(values)))
    assert_near(func.jacfwd(function, every)(*values), jacobian(case))
    assert_near(func.jacrev(function, every)(*values), jacobian(case))


@every_case
def test_forward_derivatives(case):
    """``jvp``, and dual numbers without a transform."""
    function, values = as_function(case)
    found, derivatives = func.jvp(function, values, along(case))
    assert_near(found, function(*values))
    assert_near(derivatives, derivatives_along(case))
    with forward_ad.dual_level():
        results = function(*(forward_ad.make_dual(x, d) for x, d in zip(values, along(case))))
        assert_near(tuple(forward_ad.unpack_dual(x).tangent for x in results), derivatives_along(case))


@pytest.mark.parametrize("case", [CASES[0], next(one for one in CASES if isinstance(one, Delta)), TINY], ids=str)
def test_forward_derivatives_inside_compiled_functions(case):
    """A compiled operator has none: they were 0. The call leaves the graph."""
    torch._dynamo.reset()
    (function, values), direction = as_function(case), along(case)
    found = torch.compile(lambda: func.jvp(function, values, direction), backend="aot_eager")()
    assert_near(found[1], derivatives_along(case))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("case", [CASES[0], next(one for one in CASES if isinstance(one, Delta)), TINY], ids=str)
def test_forward_derivatives_that_are_traced_once(case):
    """``linearize``, also in some of the arguments: the values of none can be read."""
    function, values = as_function(case)
    found, derivative = func.linearize(function, *values)
    assert_near(found, function(*values))
    assert_near(derivative(*along(case)), derivatives_along(case))
    one, derivative = func.linearize(lambda x: function(x, *values[1:]), values[0])
    assert_near(one, found)
    assert_near(derivative(along(case)[0]), func.jvp(lambda x: function(x, *values[1:]), values[:1], along(case)[:1])[1])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch's own trace
@pytest.mark.parametrize("derive", [gradients, second], ids=["first", "second"])
@every_case
def test_derivatives_that_are_recorded(case, derive):
    """By ``make_fx`` and, once, by compiled autograd, where values cannot be read."""
    loss, values = loss_of(case)
    wanted = derive(loss, values)
    assert_near(make_fx(lambda *values: derive(loss, values))(*values)(*values), wanted)
    if case.lengths is None and derive is gradients and not isinstance(case, Attention):
        with compiled_autograd._enable(torch.compile(backend="eager")):
            assert_near(derive(loss, values), wanted)


@every_case
def test_gradients(case):
    """``grad``, and ``vjp`` from each result alone and from all."""
    loss, values = loss_of(case)
    wanted = gradients(loss, values)
    assert_near(func.grad(loss, tuple(range(len(values))))(*values), wanted)
    function, _ = as_function(case)
    results, pull = func.vjp(function, *values)
    assert_near(results, function(*values))
    leaves = [x.clone().requires_grad_() for x in values]
    results = function(*leaves)
    ones = tuple(torch.ones_like(x) for x in results)
    for upstream in (ones, *(tuple(d * (place == one) for place, d in enumerate(ones)) for one in range(len(ones)))):
        wanted = torch.autograd.grad(results, leaves, upstream, retain_graph=True)
        assert_near(pull(upstream), wanted)


@every_case
@pytest.mark.parametrize("axis", [0, -1])
def test_vmap(case, axis):
    """All arguments mapped, along their first or a new last axis; then the first argument alone; ``vmap`` of ``grad``."""
    (function, values), (loss, _) = as_function(case), loss_of(case)
    every = tuple(range(len(values)))
    copies = [tuple(factor * x for x in values) for factor in (1, 0.5, 0.1)]
    stacked = tuple(torch.stack(x, axis) for x in zip(*copies))
    wanted = tuple(torch.stack(x) for x in zip(*(function(*one) for one in copies)))
    assert_near(func.vmap(function, in_dims=axis)(*stacked), wanted)
    wanted = tuple(torch.stack(x) for x in zip(*(gradients(loss, one) for one in copies)))
    assert_near(func.vmap(func.grad(loss, every), in_dims=axis)(*stacked), wanted)
    alone = (axis, *[None] * (len(values) - 1))
    mixed = [(one[0], *values[1:]) for one in copies]
    wanted = tuple(torch.stack(x) for x in zip(*(function(*one) for one in mixed)))
    assert_near(func.vmap(function, in_dims=alone)(stacked[0], *values[1:]), wanted)
    wanted = tuple(torch.stack(x) for x in zip(*(gradients(loss, one) for one in mixed)))
    assert_near(func.vmap(func.grad(loss, every), in_dims=alone)(stacked[0], *values[1:]), wanted)


@every_case
def test_nested_vmap(case):
    function, values = as_function(case)
    copies = [[tuple(factor * part * x for x in values) for factor in (1, 0.5)] for part in (1, 0.1, 0.3)]
    stacked = tuple(torch.stack([torch.stack([one[place] for one in row]) for row in copies]) for place in range(len(values)))
    found = func.vmap(func.vmap(function))(*stacked)
    for i, row in enumerate(copies):
        for j, one in enumerate(row):
            assert_near(tuple(x[i, j] for x in found), function(*one))


@every_case
@pytest.mark.parametrize("place", [0, 2])
def test_hessian(case, place):
    loss, values = loss_of(case)
    of_one = lambda x: loss(*values[:place], x, *values[place + 1 :])  # noqa: E731
    wanted = torch.autograd.functional.hessian(of_one, values[place])
    assert_near(func.hessian(of_one)(values[place]), wanted)
    assert_near(func.jacrev(func.grad(of_one))(values[place]), wanted)
    assert_near(func.jacfwd(func.jacrev(of_one))(values[place]), wanted)


POOLED = Pooled("gla", H=2, K=2, V=2, lengths=(1, 2), slots=(3, 0))


@every_case
def test_tensors_of_a_mesh_are_refused(case, alone):
    """Operators have no sharding rules."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    function, values = as_function(case)
    mesh = init_device_mesh("cpu", (1,))
    for place in range(len(values)):
        mixed = [distribute_tensor(x, mesh) if n == place else x for n, x in enumerate(values)]
        with pytest.raises(ps.DtypeError, match=r": (\w+) must be the tensor of one rank, got a DTensor. Pass \1.to_local\(\)"):
            function(*mixed)


@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "jacrev", "grad", "vjp", "vmap", "hessian", "dual"])
@pytest.mark.parametrize("function", [ps.advance, ps.decode_step])
def test_operators_in_place_are_refused(function, transform):
    """With the pool unchanged."""
    tensors = POOLED.tensors()
    q, k, v, g = (tensors[name].transpose(0, 1) for name in "qkvg")
    pool, before = tensors["state"], tensors["state"].clone()
    slots = torch.tensor([3, 0, 1])

    def call(q):
        return function("gla", q, k, v, g, state=pool, slots=slots).sum()

    def dual(f):
        def run(q):
            with forward_ad.dual_level():
                return f(forward_ad.make_dual(q, q))

        return run

    transforms = {
        "jvp": lambda f: lambda q: func.jvp(f, (q,), (q,)),
        "vjp": lambda f: lambda q: func.vjp(f, q)[1](torch.ones(())),
        "vmap": lambda f: lambda q: func.vmap(f)(torch.stack([q, q])),
        "dual": dual,
    }
    transformed = transforms.get(transform) or getattr(func, transform)
    with pytest.raises(ps.RangeError, match=r"the call must be outside of torch.func transforms .* state, which is updated in place"):
        transformed(call)(q)
    assert torch.equal(pool, before)


def test_forward_derivatives_check_values_and_implementations():
    q, k, v, x = (torch.randn(1, 5, 1, 4) for _ in range(4))
    with pytest.raises(ps.RangeError, match="g must be a log decay"):
        torch.func.jvp(lambda q: ps.gla(q, k, v, x.abs() + 5).output, (q,), (q,))
    offsets = torch.tensor([0, 4, 2, 5])
    with pytest.raises(ps.RangeError, match="cu_seqlens must be offsets"):
        torch.func.jvp(lambda q: ps.gla(q, k, v, -x.abs(), cu_seqlens=offsets).output, (q,), (q,))
    with pytest.raises(ps.ImplementationRefused):
        torch.func.jvp(lambda q: ps.gla(q, k, v, -x.abs(), impl="cuda").output, (q,), (q,))
