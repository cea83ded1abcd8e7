"""Fused element-wise kernels against their formulas in float64, under Triton's interpreter."""

from functools import partial

import pytest
import torch
from fused_kernels import hold, normal

from penstock.gpu.target import interpreting
from penstock.layers import decays, fused, norm_gate, rwkv7_chains, token_shift
from penstock.layers.sequences import Sequences

launch = pytest.importorskip("penstock.layers.triton.launch")
convolution_launch = pytest.importorskip("penstock.layers.triton.convolution_launch")
few_rows_launch = pytest.importorskip("penstock.layers.triton.few_rows_launch")
norm_gate_launch = pytest.importorskip("penstock.layers.triton.norm_gate_launch")
rwkv7_launch = pytest.importorskip("penstock.layers.triton.rwkv7_launch")
token_shift_launch = pytest.importorskip("penstock.layers.triton.token_shift_launch")
product = pytest.importorskip("penstock.layers.triton.product")
rows = pytest.importorskip("penstock.layers.triton.rows")
pytestmark = [pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter"), pytest.mark.sampled(file=True)]


def sequences(packed):
    """Three sequences, or with ``packed`` five, two of them empty."""
    if packed:
        return Sequences(torch.empty(1, 75, 1), torch.tensor([0, 0, 33, 40, 40, 75]))
    return Sequences(torch.empty(3, 25, 1))


def shift_kernel(x, last, starts, mu, hidden, up, formula=token_shift.shift_formula, kept=False, complement=False):
    """``TokenShift`` of factors mu [N,C]."""
    return token_shift_launch.TokenShift.apply(x, last, starts, hidden, up, formula, kept, complement, *mu.unbind())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("count", "rank", "complement"),
    [(1, 0, False), (2, 0, True), (4, 0, False), (6, 0, True), (5, 4, False), (5, 32, False), (1, 16, False)],
)
def test_token_shift(count, rank, complement, packed, dtype, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", 4)  # several blocks of tokens a program
    at = sequences(packed)
    C = 70
    x, last, mu = normal(75, C, dtype=dtype), normal(at.count, C, dtype=dtype), normal(count, C, dtype=dtype)
    hidden, up = (normal(75, count, rank, dtype=dtype), normal(count, rank, C, dtype=dtype) / rank**0.5) if rank else (None, None)
    known = partial(token_shift.shift_formula, complement=complement)

    def ours(x, mu, hidden, up):
        return shift_kernel(x, last, at.starts, mu, hidden, up, known, complement=complement)

    def formula(x, mu, hidden, up):
        return token_shift.shift_formula(x, last.double(), at.starts, 1 - mu if complement else mu, hidden, up)

    hold(ours, formula, (x, mu, hidden, up), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rank", [0, 32])
def test_token_shift_from_rows_of_a_pool(rank, packed, dtype):
    at, C = sequences(packed), 70
    pool = normal(9, 2, C, dtype=dtype)[:, 0]  # gaps between rows
    slots = torch.tensor([4, 0, 8, 1, 5][: at.count])
    x, mu = normal(75, C, dtype=dtype), normal(5, C, dtype=dtype)
    hidden, up = (normal(75, 5, rank, dtype=dtype), normal(5, rank, C, dtype=dtype) / rank**0.5) if rank else (None, None)
    found = token_shift_launch.shifted(x, pool, at.starts, slots, mu.unbind(), hidden, up, tanh=rank > 0)
    exact = [None if one is None else one.double() for one in (hidden, up)]
    wanted = token_shift.shift_formula(
        x.double(), pool[slots].double(), at.starts, mu.double(), None if hidden is None else exact[0].tanh(), exact[1]
    )
    for y, one in zip(found, wanted):
        assert (y.double() - one).norm() <= 3 * torch.finfo(dtype).eps * one.norm()
    skipped = token_shift_launch.shifted(x, pool, at.starts, torch.full_like(slots, -1), mu.unbind(), hidden, up, tanh=rank > 0)
    assert torch.equal(skipped[:, at.starts < 0], found[:, at.starts < 0])


def test_low_rank_parts_may_be_narrower_than_tokens():
    """As under autocast, where norms give float32 and products float16."""
    at = sequences(True)
    x, last, mu = normal(75, 70), normal(5, 70), normal(5, 70)

    def ours(hidden, up):
        return shift_kernel(x, last, at.starts, mu, hidden, up)

    def formula(hidden, up):
        return token_shift.shift_formula(x.double(), last.double(), at.starts, mu.double(), hidden, up)

    half = torch.float16
    hold(ours, formula, (normal(75, 5, 4, dtype=half), normal(5, 4, 70, dtype=half) / 2), dtype=half)


def test_token_shift_is_the_loop_over_tokens():
    for packed in (False, True):
        at = sequences(packed)
        last, m = normal(at.count, 3), normal(3, seed=5)
        x = normal(1, 75, 3) if packed else normal(3, 25, 3)
        (found,) = token_shift.token_shift(x, last, at, m)
        spans = [(0, 0), (0, 33), (33, 40), (40, 40), (40, 75)] if packed else [(25 * n, 25 * n + 25) for n in range(3)]
        for n, (begin, end) in enumerate(spans):
            before = last[n]
            for t in range(begin, end):
                now = x.flatten(0, 1)[t]
                torch.testing.assert_close(found.flatten(0, 1)[t], now + (before - now) * m)
                before = now


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "size", "centre", "affine", "activation", "added"),
    [
        (3, 64, True, 2, "silu", False),
        (2, 40, True, 2, "identity", True),
        (2, 96, False, 1, "sigmoid", False),
        (1, 32, False, 0, "silu", True),
    ],
)
def test_norm_gate(heads, size, centre, affine, activation, added, dtype):
    x, gate = normal(70, heads, size, dtype=dtype) + 0.5, normal(70, heads, size, dtype=dtype, seed=3)
    shape = (heads, size) if centre else (size,)
    weight = normal(*shape, dtype=dtype) if affine else None
    bias = normal(*shape, dtype=dtype, seed=9) if affine == 2 else None
    share, values = (normal(70, heads), normal(*x.shape, dtype=dtype, seed=4)) if added else (None, None)
    formula = partial(norm_gate.norm_gate_formula, eps=1e-4, centre=centre, activation=activation)
    kind, given = norm_gate_launch.Norm(1e-4, centre, activation), (x, gate, weight, bias, share, values)
    for after in (None, normal(11, heads * size, dtype=dtype) / 8):
        hold(
            lambda *given: norm_gate_launch.NormGate.apply(*given, kind, formula), lambda *given: formula(*given).flatten(1),
            (*given, after), dtype=dtype,
        )  # fmt: skip


def rwkv7_kernel(formula, *given):
    """``Inputs`` of the tensors of the formula."""
    return rwkv7_launch.Inputs.apply(formula, *(x if n in range(4, 9) or x is None else x.flatten(-2) for n, x in enumerate(given)))


def rwkv7_inputs(heads, size, mixed, dtype=torch.float32, tokens=70):
    """The tensors of ``inputs_formula``."""
    x = [normal(tokens, heads, size, dtype=dtype, seed=n) for n in range(7 if mixed else 4)]
    learned = [normal(heads, size, dtype=dtype, seed=n) for n in range(10, 16)]
    return [*x[:4], *learned[:5], *(x[4:] or [None] * 3), learned[5] if mixed else None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "size", "mixed"), [(3, 64, True), (2, 40, True), (1, 128, False), (2, 8, False)])
def test_rwkv7_inputs(heads, size, mixed, dtype, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", 4)  # several blocks of tokens a program
    formula = rwkv7_chains.inputs_formula
    given = rwkv7_inputs(heads, size, mixed, dtype)
    if dtype == torch.float32:
        given[1][:3] = 0  # below the least norm, which is constant
        given[1][3:6] *= 2.0**-30
    hold(partial(rwkv7_kernel, formula), formula, given, dtype=dtype)


def test_second_derivatives_of_rwkv7_inputs():
    inputs, results = [x.requires_grad_() for x in rwkv7_inputs(2, 8, True, tokens=5)], []
    formula = rwkv7_chains.inputs_formula
    for found in (rwkv7_kernel(formula, *inputs), formula(*inputs)):
        first = torch.autograd.grad(sum(y.sin().sum() for y in found), inputs, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(one.square().sum() for one in first), inputs)])
    for one, exact in zip(*results):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_element_wise(dtype):
    a, b, bias = normal(37, 67, dtype=dtype), normal(37, 67, dtype=dtype, seed=1), normal(67, dtype=dtype)
    weight = normal(11, 67, dtype=dtype) / 8
    for activation in ("sigmoid", "silu", "relu_squared"):
        formula, other = partial(fused.activated_formula, activation=activation), None if activation == "relu_squared" else b
        given = (activation, formula)
        hold(lambda a, b, given=given: launch.Activated.apply(a, b, *given), formula, (a, other), dtype=dtype)
        hold(lambda a, b, weight, given=given: launch.ActivatedLinear.apply(a, b, weight, *given), formula, (a, other, weight), dtype=dtype)
    hold(lambda x, bias: launch.Decay.apply(x, bias, decays.decay_formula), decays.decay_formula, (a, bias), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_relu_squared_from_its_result(dtype):
    a, formula = normal(37, 67, dtype=dtype) / 1e6, partial(fused.activated_formula, b=None, activation="relu_squared")
    hold(launch.ReluSquared.apply, formula, (a,), dtype=dtype)
    a[3, 5] = float("nan")
    a.requires_grad_()
    (d,) = torch.autograd.grad(launch.ReluSquared.apply(a).sum(), a)
    assert d.isnan().sum() == 1
    assert d[3, 5].isnan()


def test_second_derivatives_of_relu_squared():
    a, formula = normal(5, 7).requires_grad_(), partial(fused.activated_formula, b=None, activation="relu_squared")
    grads = []
    for y in (launch.ReluSquared.apply(a), formula(a)):
        (first,) = torch.autograd.grad(y.sin().sum(), a, create_graph=True)
        grads.append((first, *torch.autograd.grad(first.square().sum(), a)))
    for one, exact in zip(*grads):
        torch.testing.assert_close(one, exact)


@pytest.mark.parametrize("rank", [0, 32])
def test_gradients_of_shifted_tokens_do_not_depend_on_other_sequences(rank):
    at, x, last, mu = sequences(False), normal(75, 70), normal(3, 70), normal(5, 70)
    hidden, up = (normal(75, 5, rank), normal(5, rank, 70)) if rank else (None, None)
    upstream, found = [normal(75, 70, seed=n) for n in range(5)], []
    for end in (75, 25):  # of the first sequence: a product of float32 under the interpreter depends on the place of a row
        leaves = [one[:end].clone().requires_grad_() for one in (x, hidden) if one is not None]
        given = (mu, leaves[1] if rank else None, up)
        y = shift_kernel(leaves[0], last, at.starts[:end], *given)
        found.append([*y, *torch.autograd.grad(y, leaves, [d[:end] for d in upstream])])
    assert all(torch.equal(one[:25], alone) for one, alone in zip(*found))


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_gradients_of_further_uses_of_shifted_tokens(used):
    at, x, last, mu = sequences(True), normal(75, 70).requires_grad_(), normal(5, 70), normal(1, 70).requires_grad_()

    def ours(x, mu):
        return shift_kernel(x, last, at.starts, mu, None, None, token_shift.kept_formula, kept=True)

    def formula(x, mu):
        return token_shift.kept_formula(x, last.to(x.dtype), at.starts, mu, None, None)

    hold(ours, formula, (x, mu))
    grads = []
    for y, same in (ours(x, mu), formula(x, mu)):
        loss = sum(one.sin().sum() for one, wanted in zip((y, same), used) if wanted)
        first = torch.autograd.grad(loss, (x, mu), create_graph=True, allow_unused=True)
        grads.append([torch.autograd.grad(loss, x, retain_graph=True)[0], first[0], torch.autograd.grad(first[0].square().sum(), x)[0]])
    for one, exact in zip(*grads):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_log_sigmoids(dtype):
    kernel = launch.LogSigmoid.apply
    x = torch.cat([normal(5, 500, dtype=dtype).flatten() * 4, torch.tensor([100.0, -100.0, torch.inf, -torch.inf], dtype=dtype)])
    formula = partial(decays.log_sigmoid_formula, normalizer=16.0)
    hold(lambda x: kernel(x, 16.0, formula), formula, (x[:-1],), dtype=dtype)
    found, wanted = kernel(x, 16.0, formula), formula(x.double())
    assert found.dtype == torch.float32
    found = found.double()
    finite = wanted.isfinite()
    assert torch.equal(found[~finite], wanted[~finite])
    assert ((found - wanted)[finite].abs() <= 4 * torch.finfo(torch.float32).eps * wanted[finite].abs() + 1e-38).all()  # weak decays too
    assert kernel(torch.tensor([torch.nan, 1.0]), 16.0, formula).isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [6, 64, 100])
def test_decays_of_low_rank(rank, dtype):
    hidden, up, bias = normal(70, rank, dtype=dtype), normal(rank, 90, dtype=dtype) / rank**0.5, normal(90, dtype=dtype)
    hidden[::2] /= 30  # where tanh is its series
    found = few_rows_launch.low_rank_decay(hidden, up, bias)
    wanted = -torch.exp(bias.double() + hidden.double().tanh() @ up.double())
    assert found.dtype == torch.float32
    assert (found.double() - wanted).norm() <= 3 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("slots", [(3, 0, -1, 5), (-1, -1, -1, -2)], ids=str)
def test_states_are_written_to_the_rows_of_slots_that_are_not_negative(slots):
    states, pool = normal(4, 2, 700), normal(6, 3, 700, dtype=torch.float16)[:, :2]  # gaps between rows
    wanted = pool.clone()
    for n, slot in enumerate(slots):
        if slot >= 0:
            wanted[slot] = states[n]
    version = pool._version
    rows.write_rows(states, pool, torch.tensor(slots))
    assert torch.equal(pool, wanted)
    assert pool._version > version


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("K", "N", "across"), [(128, 40, False), (200, 17, False), (70, 32, True)])
def test_products_of_few_and_of_many_rows(K, N, across, dtype):
    weight = normal(K, N, dtype=dtype).T if across else normal(N, K, dtype=dtype)
    for rows in (1, 2, 3, 13, 140):
        x = normal(rows, K, dtype=dtype)
        wanted = x.double() @ weight.double().T
        assert (product.multiply(x, weight).double() - wanted).norm() <= 2 * torch.finfo(dtype).eps * wanted.norm()
        if rows <= 4 and not across:
            assert (product.multiply_few(x, weight).double() - wanted).norm() <= 2 * torch.finfo(dtype).eps * wanted.norm()


def test_second_derivatives_go_through_the_formula():
    a, b = normal(4, 6).requires_grad_(), normal(4, 6, seed=1).requires_grad_()
    formula = partial(fused.activated_formula, activation="silu")
    for first in (launch.Activated.apply(a, b, "silu", formula), formula(a, b)):
        (da,) = torch.autograd.grad(first.square().sum(), a, create_graph=True)
        found = torch.autograd.grad(da.sum(), (a, b))
        if first.grad_fn.name() != "MulBackward0":
            ours = found
    for x, y in zip(ours, found):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("tokens", [4, 0])
def test_second_derivatives_of_norms_gates_and_maps(tokens):
    x, gate, weight, after = (normal(*shape).requires_grad_() for shape in ((tokens, 2, 8), (tokens, 2, 8), (8,), (5, 16)))
    formula, results = partial(norm_gate.norm_gate_formula, eps=1e-3, centre=False), []
    inputs = (x, gate, weight, after)
    kernel = norm_gate_launch.NormGate.apply(x, gate, weight, *[None] * 3, after, norm_gate_launch.Norm(1e-3, False, "silu"), formula)
    for y in (kernel, formula(x, gate, weight, *[None] * 3, after)):
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(one.square().sum() for one in first), inputs)])
    for one, exact in zip(*results):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-4)


def test_one_tensor_as_two_arguments():
    a = normal(4, 6).requires_grad_()
    formula = partial(fused.activated_formula, activation="silu")
    (found,) = torch.autograd.grad(launch.Activated.apply(a, a, "silu", formula).sum(), a, create_graph=True)
    (wanted,) = torch.autograd.grad(formula(a, a).sum(), a)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("rank", "complement"), [(0, False), (0, True), (3, False)])
def test_gradients_of_the_token_before_the_first(rank, complement):
    """Without the formula."""
    at = sequences(True)
    x, last, mu = normal(75, 8), normal(5, 8).requires_grad_(), normal(2, 8)
    hidden, up = (normal(75, 2, rank), normal(2, rank, 8)) if rank else (None, None)
    found = shift_kernel(x, last, at.starts, mu, hidden, up, complement=complement)
    wanted = token_shift.shift_formula(x, last, at.starts, 1 - mu if complement else mu, hidden, up)
    grads = [torch.autograd.grad(sum(y.square().sum() for y in results), last)[0] for results in (found, wanted)]
    torch.testing.assert_close(*grads)
    assert grads[0][0].abs().max() == 0  # its sequence is empty


def test_nan_of_other_tokens_stays_theirs():
    at = sequences(False)
    x = normal(75, 8)
    x[25] = float("nan")
    (found,) = shift_kernel(x, normal(3, 8), at.starts, normal(1, 8), None, None)
    assert sorted(found.isnan().any(1).nonzero().flatten().tolist()) == [25, 26]
    assert launch.Activated.apply(x, None, "relu_squared", None).isnan().any(1).sum() == 1


def test_empty_inputs():
    at = Sequences(torch.empty(2, 0, 1))
    x, mu = torch.zeros(0, 8, requires_grad=True), torch.ones(2, 8, requires_grad=True)
    found = shift_kernel(x, torch.zeros(2, 8), at.starts, mu, None, None)
    dx, dmu = torch.autograd.grad(sum(y.sum() for y in found), (x, mu))
    assert dx.shape == (0, 8)
    assert dmu.abs().max() == 0
