"""Chains of Mamba-2 against their formulas in float64, under Triton's interpreter."""

import math

import mamba2_cases as cases
import pytest
import torch
from mamba2_cases import exact_gated_norm, layer_tensors, linear_of, norm_of, normal
from torch import nn

from penstock.call.recompute import recomputing
from penstock.gpu.target import interpreting
from penstock.layers import mamba2_chains
from penstock.layers.linear import Linear
from penstock.layers.mamba2_chains import gated_norm, time_steps
from penstock.layers.norms import GroupedRMSNorm

launch = pytest.importorskip("penstock.layers.triton.mamba2_launch")
pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter"),
    pytest.mark.usefixtures("kernels_on_a_cpu"),
]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("limits", cases.LIMITS, ids=str)
@pytest.mark.parametrize("sizes", cases.HEADS, ids=str)
def test_time_steps(sizes, limits, dtype):
    cases.check_time_steps(sizes, limits, dtype, "cpu")


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("sizes", cases.GROUPS, ids=str)
def test_gated_norm(sizes, mapped, dtype):
    cases.check_gated_norm(sizes, dtype, "cpu", mapped and dtype != torch.bfloat16)  # products of bfloat16 are wrong in the interpreter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", cases.WIDE, ids=str)
def test_gated_norm_of_wide_groups(sizes, dtype):
    cases.check_gated_norm(sizes, dtype, "cpu", mapped=True, tokens=(1, 3))


@pytest.mark.parametrize("programs", [1, 2])
def test_programs_take_several_tokens(programs, monkeypatch):
    monkeypatch.setattr("penstock.layers.triton.launch.PROGRAMS", programs)
    monkeypatch.setattr(launch, "PROGRAMS", programs)
    cases.check_time_steps((17, 64), (0.0, math.inf), torch.float32, "cpu")
    cases.check_gated_norm((8, 64, 2), torch.float32, "cpu", mapped=True)


def test_the_output_is_normed_by_groups_as_in_the_module():
    """The formula that second derivatives and other devices take is the literal one."""
    o, x, z = normal(2, 3, 4, 6).double(), normal(2, 3, 4, 6, seed=1).double(), normal(2, 3, 24).double()
    D, weight = normal(4).double(), normal(24).double()
    found = mamba2_chains.gated_norm_formula(o, x, D, z, weight, groups=2, eps=1e-3)
    torch.testing.assert_close(found, exact_gated_norm(o, x, D, z, weight, 2))


def test_gradients_at_the_limits_of_steps_are_those_of_torch():
    """softplus(25) is 25, softplus(30) is 30: gradients pass at a limit, not beyond it."""
    dt = torch.tensor([[[24.0, 25.0, 27.0, 30.0, 31.0, -torch.inf]]]).requires_grad_()
    zeros, A_log, x = torch.zeros(6, requires_grad=True), torch.zeros(6), normal(1, 1, 6, 8)
    for limits, passing in (((25.0, 30.0), [0, 1, 1, 1, 0, 0]), ((0.0, 24.0), [1, 0, 0, 0, 0, 0])):
        g, v, _ = time_steps(dt, zeros, A_log, x, limits)
        wanted = -dt.detach().clamp(*limits)
        assert torch.equal(g, wanted)
        assert torch.equal(v, x * -wanted[..., None])
        d_dt, d_bias = torch.autograd.grad(g.sum(), (dt, zeros))
        assert d_dt.flatten().tolist() == [-one for one in passing]
        assert torch.equal(d_bias, d_dt.flatten())


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of NumPy, by the interpreter
def test_gradients_of_rates_beyond_the_limit_are_those_of_the_formula():
    """A_log above 60 counts as 60: it has no gradient. With dt_bias as far below 0 the log decays are not 0."""
    A_log, dt, x = torch.tensor([-150.0, 0.0, 59.0, 62.0, 150.0]), normal(1, 4, 5), normal(1, 4, 5, 8)
    found = []
    for function in (time_steps, lambda *given: mamba2_chains.time_steps_formula(*given[:4], limits=given[4])):
        given = [one.clone().requires_grad_() for one in (dt, -A_log.clamp(min=0.0), A_log, x)]
        g, v, _ = function(*given, (0.0, math.inf))
        found.append(torch.autograd.grad(g.sum() * 1e4 + v.sum(), given))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert found[0][2][3:].eq(0).all()
    assert found[0][2][1:3].ne(0).all()


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
def test_some_results_of_time_steps(used):
    """Gradients of the others are None; second derivatives are those of the formula."""
    dt, dt_bias, A_log, x = (normal(*shape, seed=5).requires_grad_() for shape in ((2, 3, 4), (4,), (4,), (2, 3, 4, 6)))
    results = []
    for chain in (time_steps, lambda *given: mamba2_chains.time_steps_formula(*given[:4], limits=given[4])):
        found = chain(dt, dt_bias, A_log, x, (0.2, 2.0))
        loss = sum(found[n].sin().sum() for n in used)
        plain = torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)[0]
        first = torch.autograd.grad(loss, (dt, dt_bias, A_log, x), create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(sum(one.square().sum() for one in first), (dt, dt_bias, A_log, x), materialize_grads=True)
        results.append([torch.zeros_like(x) if plain is None else plain, *first, *second])
    for one, exact in zip(*results):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learned", [(0,), (3,)], ids=str)
def test_second_derivatives_of_time_steps_with_results_that_have_no_gradient(learned):
    """x does not depend on dt, nor g on x."""
    given = [normal(*shape, seed=5).requires_grad_(n in learned) for n, shape in enumerate(((2, 3, 4), (4,), (4,), (2, 3, 4, 6)))]
    leaves, results = [given[n] for n in learned], []
    for chain in (time_steps, lambda *given: mamba2_chains.time_steps_formula(*given[:4], limits=given[4])):
        loss = sum(one.sin().sum() for one in chain(*given, (0.2, 2.0)))
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(one.square().sum() for one in first), leaves)])
    for one, exact in zip(*results):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, 0])
@pytest.mark.parametrize("mapped", [False, True])
def test_second_derivatives_of_gated_norms(mapped, tokens):
    o, x, z = (normal(2, tokens, *rest, seed=n) for n, rest in enumerate(((4, 6), (4, 6), (24,))))
    D, weight, after = normal(4), normal(24), normal(5, 24)
    inputs = [one.requires_grad_() for one in (o, x, D, z, weight, *([after] if mapped else []))]
    ours = gated_norm(o, x, D, z, norm_of(weight, 2), linear_of(after) if mapped else nn.Identity())
    formula = mamba2_chains.gated_norm_formula(o, x, D, z, weight, after if mapped else None, groups=2, eps=1e-3)
    results = []
    for y in (ours, formula):
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(one.square().sum() for one in first), inputs)])
    for one, exact in zip(*results):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-4)


def test_tensors_are_read_in_place(monkeypatch):
    """Views of wider tensors and tokens that are one, evenly spaced or expanded are not copied; others are."""
    seen = []
    monkeypatch.setattr(launch, "_strides", lambda *given, known=launch._strides: seen.append(given) or known(*given))
    for B, T in ((1, 1), (1, 5), (4, 1), (2, 5)):
        seen.clear()
        o, x, D, z, weight, dt, dt_bias, A_log = layer_tensors(B, T)
        time_steps(dt, dt_bias, A_log, x, (0.0, 1.0))
        gated_norm(o, x, D, z, norm_of(weight, 1), nn.Identity())
        for found, given in zip([one for some in seen for one in some], (dt, x, o, x, z)):
            assert found.data_ptr() == given.data_ptr()
            assert found.stride(0) == (given.stride(1) if B == 1 else given.stride(0) // T)
    o, x, D, z, weight, *_ = layer_tensors(2, 5)
    wanted = exact_gated_norm(*(one.double() for one in (o[:, ::2], x[:, ::2], D, z[:, :1].expand(2, 3, 24), weight)), 1)
    found = gated_norm(o[:, ::2], x[:, ::2], D, z[:, :1].expand(2, 3, 24), norm_of(weight, 1), nn.Identity())
    cases.within(found, wanted, torch.float32)
    apart = o.transpose(2, 3).contiguous().transpose(2, 3)
    found, wanted = (gated_norm(one, x, D, z, norm_of(weight, 1), nn.Identity()) for one in (apart, o))
    assert torch.equal(found, wanted)


def test_parameters_of_any_strides():
    o, x, D, z, weight, dt, dt_bias, A_log = layer_tensors(2, 3)
    apart = [torch.stack([one, torch.full_like(one, torch.nan)], -1)[..., 0] for one in (D, weight, dt_bias, A_log)]
    found = [*time_steps(dt, *apart[2:], x, (0.0, 1.0)), gated_norm(o, x, apart[0], z, norm_of(apart[1], 1), nn.Identity())]
    wanted = [*time_steps(dt, dt_bias, A_log, x, (0.0, 1.0)), gated_norm(o, x, D, z, norm_of(weight, 1), nn.Identity())]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted))


def test_results_of_a_token_do_not_depend_on_the_others():
    o, x, D, z, weight, dt, dt_bias, A_log = layer_tensors(2, 9)

    def chains(rows, tokens):
        given = [one[rows, tokens] for one in (o, x, z, dt)]
        y = gated_norm(given[0], given[1], D, given[2], norm_of(weight, 3), nn.Identity())
        return [*time_steps(given[3], dt_bias, A_log, given[1], (0.0, 1.0))[:2], y]

    whole = chains(slice(None), slice(None))
    for rows, tokens in ((slice(1, 2), slice(4, 5)), (slice(0, 2), slice(3, 4)), (slice(1, 2), slice(2, 8))):
        assert all(torch.equal(one[rows, tokens], part) for one, part in zip(whole, chains(rows, tokens)))


def test_small_steps():
    cases.check_small_steps("cpu")


def test_nan_of_a_token_stays_its_own():
    cases.check_nan("cpu")


@pytest.mark.parametrize("apart", [lambda d: d.transpose(0, 1).contiguous().transpose(0, 1), lambda d: d[:1, :1].expand_as(d)])
def test_upstream_gradients_of_any_strides(apart):
    o, x, D, z, weight, dt, dt_bias, A_log = given = [one.requires_grad_() for one in layer_tensors(2, 5)]
    results = [*time_steps(dt, dt_bias, A_log, x, (0.0, 1.0)), gated_norm(o, x, D, z, norm_of(weight, 1), nn.Identity())]
    upstream = [apart(normal(*one.shape)) for one in results]
    assert not upstream[3].is_contiguous()
    found = torch.autograd.grad(results, given, upstream, retain_graph=True)
    wanted = torch.autograd.grad(results, given, [one.contiguous() for one in upstream])
    assert all(torch.equal(one, other) for one, other in zip(found, wanted))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (1, 0)])
def test_empty_calls(shape):
    o, x, D, z, weight, dt, dt_bias, A_log = (one.requires_grad_() for one in layer_tensors(*shape))
    g, v, same = time_steps(dt, dt_bias, A_log, x, (0.0, 1.0))
    after = normal(5, 24).requires_grad_()
    y = gated_norm(o, same, D, z, norm_of(weight, 3), linear_of(after))
    assert [one.shape for one in (g, v, y)] == [(*shape, 3), (*shape, 3, 8), (*shape, 5)]
    inputs = o, x, D, z, weight, dt, dt_bias, A_log, after
    grads = torch.autograd.grad([g, v, y], inputs, [torch.ones_like(one) for one in (g, v, y)])
    assert all(one.shape == given.shape and not one.any() for one, given in zip(grads, inputs))


def kept(function):
    """The addresses of the memory that the backward pass of a call keeps."""
    found = set()

    def pack(one):
        found.add(one.untyped_storage().data_ptr())
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        results = function()
    return found, results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_nothing_is_kept_but_inputs(dtype):
    o, x, D, z, weight, dt, dt_bias, A_log = given = [one.requires_grad_() for one in layer_tensors(2, 50, dtype)]
    after = normal(5, 24, dtype=dtype).requires_grad_()
    inputs = {one.untyped_storage().data_ptr() for one in (*given, after)}
    for function in (
        lambda: time_steps(dt, dt_bias, A_log, x, (0.0, 1.0)),
        lambda: gated_norm(o, x, D, z, norm_of(weight, 1), linear_of(after)),
    ):
        found, _results = kept(function)
        assert found <= inputs


@pytest.mark.parametrize("fused", [False, True])
def test_values_and_log_decays_are_computed_again_inside_of_recomputing(fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(mamba2_chains, "refusal", lambda *tensors: "none")
    _, x, _, _, _, dt, dt_bias, A_log = layer_tensors(2, 50, torch.float16)
    inputs = [one.requires_grad_() for one in (dt, dt_bias, A_log, x)]

    def losses():
        g, v, _ = time_steps(*inputs, (0.0, 1.0))
        return g, v, g.sin(), v.sin()

    def inside():
        with recomputing():
            return losses()

    grads = []
    for function in (losses, inside):
        found, (g, v, *results) = kept(function)
        assert ({one.untyped_storage().data_ptr() for one in (g, v)} <= found) == (function is losses)
        grads.append(torch.autograd.grad(results, inputs, [torch.ones_like(one) for one in results]))
    assert all(torch.equal(one, other) for one, other in zip(*grads))


@pytest.mark.parametrize("reason", ["hooks", "class", "dtypes", "wide"])
def test_other_norms_and_dtypes_run_as_modules(reason, ran):
    o, x, D, z, weight, dt, dt_bias, A_log = layer_tensors(2, 3)
    norm, calls = norm_of(weight, 1), []
    if reason == "hooks":
        norm.register_forward_hook(lambda *given: calls.append(1))
    elif reason == "class":
        norm.__class__ = type("Other", (GroupedRMSNorm,), {})
    elif reason == "dtypes":
        o = o.half()
    elif reason == "wide":
        o, x, z = (one.repeat_interleave(400, -1) for one in (o, x, z))
        norm = norm_of(weight.repeat_interleave(400), 1)
    found = gated_norm(o, x, D, z, norm, nn.Identity())
    assert torch.equal(found, norm(torch.addcmul(o, x, D[:, None]).flatten(-2), z))
    steps = time_steps(dt, dt_bias, A_log, x.half() if reason == "dtypes" else x, (0.0, 1.0))
    assert ran() == ({"time_steps": 1} if reason in ("hooks", "class") else {})
    assert steps[0].dtype == torch.float32
    assert len(calls) == 2 * (reason == "hooks")


@pytest.mark.parametrize(("size", "groups"), [(20, 1), (28, 1), (24, 5)])
def test_norms_of_other_sizes_raise(size, groups, ran):
    o, x, D, z, *_ = layer_tensors(2, 3)
    with pytest.raises(RuntimeError):
        gated_norm(o, x, D, z, GroupedRMSNorm(size, groups, 1e-3), nn.Identity())
    assert not ran()


@pytest.mark.parametrize("which", ["D", "dt_bias", "A_log"])
def test_parameters_of_other_sizes_raise(which, ran):
    o, x, D, z, weight, dt, dt_bias, A_log = layer_tensors(2, 3)
    given = {"D": D, "dt_bias": dt_bias, "A_log": A_log}
    given[which] = given[which][:-1]
    calls = {"D": lambda: gated_norm(o, x, given["D"], z, norm_of(weight, 1), nn.Identity())}
    call = calls.get(which, lambda: time_steps(dt, given["dt_bias"], given["A_log"], x, (0.0, 1.0)))
    with pytest.raises(RuntimeError):
        call()
    assert not ran()


def test_under_autocast_float32_weights_are_rounded_for_the_linear_map(ran):
    """Everything else is read as it is."""
    o, x, D, z, weight, dt, dt_bias, A_log = layer_tensors(2, 3, torch.float16)
    D, weight, after = (one.float().requires_grad_() for one in (D, weight, normal(5, 24)))
    with torch.autocast("cpu", torch.float16):
        g, v, x = time_steps(dt, dt_bias, A_log, x, (0.0, 1.0))
        y = gated_norm(o, x, D, z, norm_of(weight, 1), linear_of(after))
    assert ran() == {"time_steps": 1, "gated_norm_linear": 1}
    assert (g.dtype, v.dtype, y.dtype) == (torch.float32, torch.float16, torch.float16)
    exact = [one.detach().double().requires_grad_() for one in (D, weight, after)]
    wanted = exact_gated_norm(o.double(), x.double(), exact[0], z.double(), exact[1], 1) @ exact[2].T
    cases.within(y, wanted, torch.float16)
    for one, true in zip(torch.autograd.grad(y, (D, weight, after), y), torch.autograd.grad(wanted, exact, y.double())):
        assert one.dtype == torch.float32
        cases.within(one, true, torch.float16)


@pytest.mark.parametrize("how", ["bias", "hooks", "dtype"])
def test_linear_maps_that_are_not_plain_run_as_modules(how, ran):
    o, x, D, z, weight, *_ = layer_tensors(2, 3)
    torch.manual_seed(0)
    then, calls = Linear(24, 5, bias=how == "bias"), []
    if how == "hooks":
        then.register_forward_hook(lambda *given: calls.append(1))
    elif how == "dtype":
        then = nn.Sequential(then)
    found = gated_norm(o, x, D, z, norm_of(weight, 1), then)
    torch.testing.assert_close(found, then(norm_of(weight, 1)(torch.addcmul(o, x, D[:, None]).flatten(-2), z)))
    assert ran() == {"gated_norm": 1}
    assert len(calls) == 2 * (how == "hooks")


def test_one_tensor_as_several_arguments():
    x, D, weight = normal(2, 3, 3, 8).requires_grad_(), normal(3), normal(24)
    found = torch.autograd.grad(gated_norm(x, x, D, x.flatten(-2), norm_of(weight, 1), nn.Identity()).sin().sum(), x)
    wanted = torch.autograd.grad(exact_gated_norm(x, x, D, x.flatten(-2), weight, 1).sin().sum(), x)
    torch.testing.assert_close(found, wanted)
