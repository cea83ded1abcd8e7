"""Feature maps, activations and decay rules keep relative accuracy where their results are small: values and derivatives."""

import math
from contextlib import nullcontext
from typing import get_args

import mpmath as mp
import pytest
import torch

import penstock as ps
from penstock.layers import LinearAttentionConfig, activations, decays, fused, mamba2_chains
from penstock.layers.activations import ACTIVATIONS
from penstock.layers.convolution import ShortConvolution
from penstock.layers.sequences import Sequences
from penstock.layers.token_shift import token_shift
from penstock.recurrence.operators import FAMILY
from penstock.tokens.decays import LARGEST
from penstock.tokens.dtypes import state_dtype
from penstock.tokens.feature_maps import FEATURE_MAPS

POINTS = (
    -300, -88.5, -80, -40, -20, -17.3, -12, -9.06, -9, -7, -5, -3, -2, -1, -0.3, -1e-2, -1e-3, -1e-5, -1e-7,
    1e-7, 1e-5, 1e-3, 1e-2, 0.3, 1, 2, 3, 5, 7, 9, 12, 17.3, 20, 40, 80, 300,
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def sigmoid(x):
    return 1 / (1 + mp.exp(-x))


EXACT = {
    "elu+1": (lambda x: mp.exp(x) if x < 0 else 1 + x, lambda x: mp.exp(x) if x < 0 else mp.mpf(1)),
    "relu": (lambda x: max(x, mp.mpf(0)), lambda x: mp.mpf(x > 0)),
    "identity": (lambda x: x, lambda x: mp.mpf(1)),
    "silu": (lambda x: x * sigmoid(x), lambda x: sigmoid(x) * (1 + x * sigmoid(-x))),
    "sigmoid": (sigmoid, lambda x: sigmoid(x) * sigmoid(-x)),
    "squared_relu": (lambda x: max(x, mp.mpf(0)) ** 2, lambda x: 2 * max(x, mp.mpf(0))),
    "tanh": (mp.tanh, lambda x: mp.sech(x) ** 2),
    "softplus": (lambda x: mp.log1p(mp.exp(x)), sigmoid),
    "log sigmoid": (lambda x: -mp.log1p(mp.exp(-x)), lambda x: sigmoid(-x)),
    "-exp": (lambda x: -mp.exp(min(x, LARGEST)), lambda x: -mp.exp(x) if x <= LARGEST else mp.mpf(0)),
}
"""Each function and its derivative, in as many digits as are wanted."""
SECOND = {
    "elu+1": lambda x: mp.exp(x) if x < 0 else mp.mpf(0),
    "sigmoid": lambda x: sigmoid(x) * sigmoid(-x) * (sigmoid(-x) - sigmoid(x)),
    "tanh": lambda x: -2 * mp.tanh(x) * mp.sech(x) ** 2,
}


def gated(name):
    return lambda x: fused.activated(x, None if name == "relu_squared" else torch.ones_like(x), name)


def time_steps(x):
    zeros, ones = x.new_zeros(1), torch.ones_like(x)[None, :, None, None]
    return -mamba2_chains.time_steps(x[None, :, None], zeros, zeros, ones, (0.0, math.inf))[0].flatten()


def convolution(x):
    layer = ShortConvolution(len(x), 1, bias=False).to(x.dtype)
    torch.nn.init.ones_(layer.weight)
    return layer(x[None, None], x.new_zeros(1, 0, len(x)), Sequences(x[None, None]))[0].flatten()


OURS = {
    **{f"feature map {name}": (one, name) for name, one in FEATURE_MAPS.items()},
    **{f"layer's {name}": (one, name) for name, one in ACTIVATIONS.items()},
    **{f"gate {name}": (gated(name), {"relu_squared": "squared_relu"}.get(name, name)) for name in get_args(fused.Activation)},
    "tanh": (activations.tanh, "tanh"),
    "convolution": (convolution, "silu"),
    "gla": (lambda x: decays.log_sigmoid(x, 1.0), "log sigmoid"),
    "rwkv": (lambda x: decays.decay(x[None], x.new_zeros(x.shape))[0], "-exp"),
    "mamba2": (time_steps, "softplus"),
}
"""What operators and layers compute, and its name in EXACT."""
every_function = pytest.mark.parametrize("name", OURS)


def hold(found, exact, points, roundings):
    """Each value has a relative error of a few roundings, in its dtype and in the arithmetic behind it.

    An exponential of x is that of a rounded x: abs(x) roundings more. What is below the range of a dtype has its smallest step as error.
    """
    step, arithmetic = torch.finfo(found.dtype), torch.finfo(state_dtype(found.dtype))
    lost = step.tiny * step.eps + arithmetic.tiny
    with mp.workdps(60):
        for x, value in zip(points.tolist(), found.double().tolist()):
            wanted = exact(mp.mpf(x))
            if abs(wanted) > step.max:
                assert math.isinf(value), (x, value)
                continue
            allowed = (roundings * step.eps + (4 + abs(x)) * arithmetic.eps) * abs(wanted) + lost
            assert abs(mp.mpf(value) - wanted) <= allowed, (x, value, float(wanted))


def holds(name, dtype, roundings=2):
    ours, exact = OURS[name][0], EXACT[OURS[name][1]]
    x = torch.tensor(POINTS, dtype=torch.float64).to(dtype).requires_grad_()
    y = ours(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.dtype in (dtype, state_dtype(dtype))
    assert dx.dtype == dtype
    hold(y, exact[0], x.detach(), roundings)
    hold(dx, exact[1], x.detach(), roundings)


def test_every_activation_has_its_exact_form():
    assert {one for _, one in OURS.values()} == set(EXACT)
    pointwise = {name for name, (one, _) in OURS.items() if isinstance(one, activations.Pointwise)}
    assert {OURS[name][1] for name in pointwise} == set(SECOND)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_function
def test_values_and_derivatives(name, dtype):
    holds(name, dtype)
    with torch.no_grad():
        x = torch.tensor(POINTS, dtype=torch.float64).to(dtype)
        hold(OURS[name][0](x), EXACT[OURS[name][1]][0], x, 2)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@every_function
def test_values_and_derivatives_under_autocast(name, dtype):
    with torch.autocast("cpu", dtype=dtype):
        holds(name, dtype)
        holds(name, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@every_function
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of NumPy, by the interpreter
def test_values_and_derivatives_of_kernels(name, dtype, kernels_on_a_cpu):
    holds(name, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, (_, exact) in OURS.items() if exact in SECOND and not name.startswith("gate")])
def test_second_derivatives_and_transforms(name, dtype):
    ours, name = OURS[name]
    x = torch.tensor(POINTS, dtype=torch.float64).to(dtype)
    points = x[(x.abs() > 1e-2) & (x.abs() < 60)]  # the second derivatives of sigmoid and tanh cross 0 at 0
    x = points.clone().requires_grad_()
    y = ours(x)
    (first,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    (second,) = torch.autograd.grad(first, x, torch.ones_like(first))
    hold(second, SECOND[name], points, 20)
    one, two = torch.func.grad(ours), torch.func.grad(torch.func.grad(ours))
    hold(torch.vmap(one)(points), EXACT[name][1], points, 3)
    hold(torch.vmap(two)(points), SECOND[name], points, 20)
    tangents = torch.func.jvp(ours, (points,), (torch.ones_like(points),))
    hold(tangents[0], EXACT[name][0], points, 3)
    hold(tangents[1], EXACT[name][1], points, 3)
    hold(torch.func.hessian(lambda x: ours(x).sum())(points).diagonal(), SECOND[name], points, 20)


@pytest.mark.slow
def test_compiled():
    names = [name for name in OURS if name.startswith(("feature map", "layer's", "tanh"))]

    @torch.compile(fullgraph=True)
    def every(x):
        return [OURS[name][0](x) for name in names]

    for dtype in DTYPES[:2]:
        x = torch.tensor(POINTS, dtype=torch.float64).to(dtype).requires_grad_()
        for name, y in zip(names, every(x)):
            hold(y.detach(), EXACT[OURS[name][1]][0], x.detach(), 3)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
            hold(dx, EXACT[OURS[name][1]][1], x.detach(), 3)


# normalisers


def inputs(shift, dtype, T=10):
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(1, T, 2, 16, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [(one + (shift if n < 2 else 0)).to(dtype) for n, one in enumerate(draws)]


def weighted_means(q, k, v, constant=False):
    """Katharopoulos et al. 2020, equations 9 and 12, in float64; the largest feature of a row of q cancels.

    ``constant``: the sums of weights have no gradient. The whole gradient is the difference of this part and another one.
    """
    log_q, log_k = (torch.where(x < 0, x, torch.log1p(x.clamp(min=0))) for x in (q, k))
    weights = torch.einsum("bihk,bjhk->bhij", torch.exp(log_q - log_q.amax(-1, keepdim=True)), torch.exp(log_k)).tril()
    sums = weights.sum(-1, keepdim=True)
    return torch.einsum("bhij,bjhv->bihv", weights / (sums.detach() if constant else sums), v)


def means_hold(function, q, k, v, dtype):
    found = function(*(x.requires_grad_() for x in (q, k, v)))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted, weighted = weighted_means(*exact), weighted_means(*exact, constant=True)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(found.dtype)
    grads = torch.autograd.grad(found, (q, k, v), weight)
    exact_grads, parts = (torch.autograd.grad(one, exact, weight.double()) for one in (wanted, weighted))
    for one, other, part in zip((found, *grads), (wanted, *exact_grads), (wanted, *parts)):
        cancelled = max((part.norm() / other.norm()).item(), 1)
        assert ((one.double() - other).norm() / other.norm()).item() < cancelled * (8 * torch.finfo(dtype).eps + 2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [-60, -20, -9, 0, 20])
@pytest.mark.parametrize("impl", [one.name for one in FAMILY.implementations])
def test_normalised_linear_attention(impl, shift, dtype):
    q, k, v = inputs(shift, dtype)

    def normalised(q, k, v):
        return ps.linear_attention(q, k, v, feature_map="elu+1", normalize=True, impl=impl).output

    try:
        normalised(q, k, v)
    except ps.ImplementationRefused as refused:
        pytest.skip(str(refused))
    means_hold(normalised, q, k, v, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_long_sums_of_weights(dtype):
    """Sums beyond float16's 65504."""
    q, k, v = inputs(20, dtype, T=400)
    means_hold(lambda *given: ps.linear_attention(*given, feature_map="elu+1", normalize=True).output, q, k, v, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shift", [-20, -9, 0, 20])
def test_normalised_linear_attention_under_autocast(shift, dtype):
    q, k, v = inputs(shift, torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        assert ps.linear_attention(q, k, v, feature_map="elu+1", normalize=True).output.dtype == dtype
        means_hold(lambda *given: ps.linear_attention(*given, feature_map="elu+1", normalize=True).output, q, k, v, dtype)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [-20, -9, 0, 20])
def test_layer(shift, dtype, autocast):
    """Q and k are linear maps of x, whose last channel is the shift."""
    if autocast and dtype not in DTYPES[:2]:
        pytest.skip("no dtype of autocast")
    layer = LinearAttentionConfig(num_heads=2, normalize=True, use_output_norm=False).build(16).to(torch.float32 if autocast else dtype)
    with torch.no_grad():
        for one in (layer.q_proj, layer.k_proj):
            one.weight[:, -1] = 1
        layer.o_proj.weight.copy_(torch.eye(16))
    x = torch.randn(1, 20, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[..., -1] = shift
    x = x.to(layer.o_proj.weight.dtype)
    with torch.autocast("cpu", dtype=dtype) if autocast else nullcontext():
        q, k, v = ((one(x).unflatten(-1, (2, 8))).detach() for one in (layer.q_proj, layer.k_proj, layer.v_proj))
        wanted = weighted_means(*(one.double() for one in (q, k, v))).flatten(-2)
        found, _ = layer(x)
        pool = layer.initial_state(1, x)
        with torch.no_grad():
            steps = torch.cat([layer.advance(x[:, t : t + 1], pool) for t in range(20)], 1)
    for one in (found, steps):
        assert ((one.double() - wanted).norm() / wanted.norm()).item() < 4 * torch.finfo(dtype).eps + 2e-6


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_shares_of_a_token(dtype, kernel, request):
    """RWKV-5: x m + p (1 - m) with the bits of m, also where 1 - m rounds to 1; here p is 0."""
    if kernel:
        request.getfixturevalue("kernels_on_a_cpu")
    m = torch.tensor([1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 0.1], dtype=torch.float64).to(dtype)
    x = torch.full((5, 1, 6), 3.0, dtype=dtype)
    with torch.no_grad():
        (y,) = token_shift(x, torch.zeros(5, 6, dtype=dtype), Sequences(x), m, complement=True)
    wanted = 3 * m.double()
    assert ((y[:, 0].double() - wanted).abs() <= 4 * torch.finfo(dtype).eps * wanted).all()
