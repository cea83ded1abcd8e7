"""The fused kernel of a sum and its norm against its formula in float64, under Triton's interpreter."""

from functools import partial

import pytest
import torch
from fused_kernels import hold, normal

from penstock.gpu.target import interpreting
from penstock.layers import fused
from penstock.layers.norms import RMSNorm

launch = pytest.importorskip("penstock.layers.triton.launch")
pytestmark = [pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter"), pytest.mark.sampled(file=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("channels", "centre", "bias"), [(70, True, True), (70, True, False), (1000, False, False)])
def test_sums_and_their_norms(channels, centre, bias, dtype):
    x, y, weight, shift = (normal(*shape, dtype=dtype, seed=n) for n, shape in enumerate([(5, channels)] * 2 + [(channels,)] * 2))
    for other in (None, y):
        total, normed = launch.add_norm(x, other, weight, shift if bias else None, 1e-3, centre, dtype)
        assert torch.equal(total, x if other is None else x + y)
        sums = total.double() - centre * total.double().mean(-1, keepdim=True)
        wanted = sums / (sums.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double() + bias * shift.double()
        assert (normed.double() - wanted).norm() <= 2 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "channels", "centre", "bias"), [(70, 70, True, True), (70, 70, True, False), (33, 1000, False, False), (3, 5000, True, True)]
)
def test_gradients_of_sums_and_their_norms(tokens, channels, centre, bias, dtype, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", 2)  # several blocks of tokens a program
    x, y = (normal(tokens, channels, dtype=dtype, seed=n) + 0.5 for n in range(2))
    weight, shift = normal(channels, dtype=dtype), normal(channels, dtype=dtype, seed=9) if bias else None
    known = partial(fused.norm_formula, eps=1e-3, centre=centre)

    def formula(x, y, weight, shift):
        total = x if y is None else x + y
        if dtype == torch.float16:
            total = total + ((total.half() if y is None else x.half() + y.half()) - total).detach()  # the norm is that of the rounded sum
        return known(total, weight, shift)

    for other in (None, y):
        hold(lambda *given: launch.AddNorm.apply(*given, 1e-3, centre, dtype, known), formula, (x, other, weight, shift), dtype=dtype)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("added", [False, True])
def test_one_result_of_a_sum_and_its_norm(added, used):
    """Gradients of the other one are None."""
    x, y, weight = normal(5, 70).requires_grad_(), normal(5, 70, seed=1).requires_grad_() if added else None, normal(70)
    known = partial(fused.norm_formula, eps=1e-3, centre=False)
    found, wanted = launch.AddNorm.apply(x, y, weight, None, 1e-3, False, x.dtype, known), known(x + y if added else x, weight, None)
    inputs = [one for one in (x, y) if one is not None]
    grads = [torch.autograd.grad(one[used].square().sum(), inputs, retain_graph=True) for one in (found, wanted)]
    for one, exact in zip(*grads):
        torch.testing.assert_close(one, exact)


def test_summands_get_gradients_that_later_sums_do_not_change():
    """Both get one tensor; x is used again before, and its further gradient is added to its own only."""
    x, y, weight, known = normal(5, 70).requires_grad_(), normal(5, 70, seed=1).requires_grad_(), normal(70), fused.norm_formula
    total, normed = launch.AddNorm.apply(x, y, weight, None, 1e-3, True, x.dtype, partial(known, eps=1e-3, centre=True))
    (total.square().sum() + normed.square().sum() + (3 * x).sum()).backward()
    torch.testing.assert_close(x.grad, y.grad + 3)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("centre", [False, True])
def test_second_derivatives_of_sums_and_their_norms(centre, added):
    x, y, weight, bias = (normal(*shape, seed=n).requires_grad_() for n, shape in enumerate([(5, 70)] * 2 + [(70,)] * 2))
    y, bias, known = y if added else None, bias if centre else None, partial(fused.norm_formula, eps=1e-3, centre=centre)
    inputs = [one for one in (x, y, weight, bias) if one is not None]
    results = []
    for total, normed in (
        launch.AddNorm.apply(x, y, weight, bias, 1e-3, centre, x.dtype, known),
        known(x + y if added else x, weight, bias),
    ):
        first = torch.autograd.grad((total.cos() * normed.sin()).sum(), inputs, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(one.square().sum() for one in first), inputs)])
    for one, exact in zip(*results):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-4)


def test_nan_and_empty_inputs_of_sums_and_their_norms():
    known = partial(fused.norm_formula, eps=1e-3, centre=True)
    for tokens in (6, 0):
        x, weight = normal(tokens, 70), normal(70).requires_grad_()
        x[1:2] = float("nan")
        x.requires_grad_()
        total, normed = launch.AddNorm.apply(x, x, weight, None, 1e-3, True, x.dtype, known)
        upstream = normal(70, tokens).T  # not contiguous
        torch.autograd.backward((total, normed), (upstream, upstream))
        assert x.grad.isnan().any(1).nonzero().flatten().tolist() == [1][:tokens]
        assert weight.grad.isnan().all() if tokens else not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("others", [(torch.float32, torch.float16), (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize(("centre", "added"), [(True, True), (False, False)])
def test_sums_and_their_norms_of_several_dtypes(centre, added, others, dtype, monkeypatch):
    """As under autocast, and of a float32 residual stream. ``others``: of x and its sum, and of y; the norm has ``dtype``."""
    monkeypatch.setattr(launch, "PROGRAMS", 2)
    x, y, weight, bias = (
        normal(*shape, dtype=kind, seed=n) for n, (shape, kind) in enumerate(zip([(40, 70)] * 2 + [(70,)] * 2, [*others] * 2))
    )
    known = partial(fused.norm_formula, eps=1e-3, centre=centre)
    given = x, y if added else None, weight, bias if centre else None
    total, normed = launch.AddNorm.apply(*given, 1e-3, centre, dtype, known)
    assert total.dtype == (torch.float32 if added else x.dtype)
    assert normed.dtype == dtype
    eps = max(torch.finfo(one).eps for one in (dtype, others[0], others[1] if added else others[0]))

    def formula(x, y, weight, bias):
        return known(x if y is None else x + y, weight, bias)

    hold(
        lambda *given: launch.AddNorm.apply(*given, 1e-3, centre, dtype, known),
        formula,
        given,
        dtype=torch.float16 if eps > 1e-5 else torch.float32,
    )


def test_norms_without_a_kernel_for_their_dtypes_are_those_of_the_module(ran):
    x, norm = normal(2, 3, 70).requires_grad_(), RMSNorm(70, 1e-3)
    for one, other in ((x.half(), None), (x, x.half())):
        total, normed = fused.add_norm(one, other, norm)
        assert total.dtype == (one.dtype if other is None else torch.float32)
        assert torch.equal(normed, norm(total))
    assert not ran()
    fused.add_norm(x, None, norm)
    fused.add_norm(x, None, norm.half(), in_float32=True)
    assert ran() == {"add_norm": 2}


def test_norms_under_autocast_have_its_dtype_where_linear_maps_would_round_them(ran):
    x, norm = normal(2, 3, 70).requires_grad_(), RMSNorm(70, 1e-3)
    with torch.autocast("cpu", dtype=torch.float16):
        total, normed = fused.add_norm(x, x.half(), norm)
        _, whole = fused.add_norm(x, None, norm, rounded=False)
    assert (total.dtype, normed.dtype, whole.dtype) == (torch.float32, torch.float16, torch.float32)
    assert ran() == {"add_norm": 2}
    (normed.float().square().sum() + whole.sum()).backward()
    assert x.grad.dtype == norm.weight.grad.dtype == torch.float32
