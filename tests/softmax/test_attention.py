"""Softmax attention: the oracle against the formula, and what every implementation promises besides the contract."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from attention import IMPLEMENTATIONS, Attention, exact
from cases import arithmetic
from contract import problem_of, run

import penstock as ps
from penstock.softmax import reference

FLOAT32, FLOAT64, BFLOAT16 = torch.float32, torch.float64, torch.bfloat16
PLAIN = Attention()

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
"""NumPy's, of values in the interpreter that masks discard."""

every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def random(*shapes, dtype=FLOAT32):
    made = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]


def test_oracle_is_the_formula():
    q, k, v = random(*[(1, 6, 2, 3)] * 3, dtype=FLOAT64)
    case = Attention(B=1, Tq=6, Tk=6, G=2, D=3, scale=0.7, window=3, dtype=FLOAT64)
    output, lse = reference.exact(problem_of(case, {"q": q, "k": k, "v": v}))
    for i in range(6):
        for h in range(2):
            weights = {j: torch.exp(0.7 * q[0, i, h] @ k[0, j, h]) for j in range(max(0, i - 2), i + 1)}
            total = sum(weights.values())
            assert torch.allclose(output[0, i, h], sum(w * v[0, j, h] for j, w in weights.items()) / total)
            assert torch.allclose(lse[0, i, h], total.log())


@every_implementation
def test_last_query_is_aligned_with_the_last_key(impl):
    before, q, k, v = random((1, 2, 1, 4), (1, 3, 1, 4), (1, 5, 1, 4), (1, 5, 1, 4))
    whole = ps.softmax_attention(torch.cat([before, q], 1), k, v, impl=impl)
    assert torch.allclose(ps.softmax_attention(q, k, v, impl=impl), whole[:, 2:], atol=1e-6)


@every_implementation
def test_partial_attention_is_merged_by_lse(impl):
    q, k, v = random((1, 4, 2, 8), (1, 50, 2, 8), (1, 50, 2, 8))
    options = {"causal": False, "return_lse": True, "impl": impl}
    parts = [ps.softmax_attention(q, k[:, part], v[:, part], **options) for part in (slice(0, 20), slice(20, 50))]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0)
    joined = sum(w[..., None] * output for w, (output, _) in zip(weights, parts))
    assert torch.allclose(joined, ps.softmax_attention(q, k, v, causal=False), atol=1e-6)


@every_implementation
@pytest.mark.parametrize("Tk", [0, 4])
def test_queries_without_keys_get_zeros_and_no_gradient(Tk, impl):
    """From either result alone; gradients of lse at these queries are ignored, also NaN, as torch.logaddexp makes them."""
    leaves = [x.requires_grad_() for x in random(*[(1, T, 1, 8) for T in (9, Tk, Tk)])]
    output, lse = ps.softmax_attention(*leaves, return_lse=True, impl=impl)
    alone = 9 - Tk
    assert not output[:, :alone].any()
    assert (lse[:, :alone] == float("-inf")).all()
    upstream = torch.ones_like(output), torch.where(lse.isfinite(), 1.0, float("nan"))
    for which in (slice(0, 1), slice(1, 2), slice(0, 2)):
        options = {"retain_graph": True, "materialize_grads": True}  # lse does not depend on v
        gradients = torch.autograd.grad((output, lse)[which], leaves, upstream[which], **options)
        assert not gradients[0][:, :alone].any()
        assert all(x.isfinite().all() for x in gradients)


@every_implementation
def test_masked_keys_have_no_effect(impl):
    q, k, v = random(*[(1, 100, 2, 16)] * 3)
    before = ps.softmax_attention(q, k, v, window=40, impl=impl)
    k[:, 60:], v[:, 60:] = 1e4, -1e4
    k[:, :10] = -1e4
    after = ps.softmax_attention(q, k, v, window=40, impl=impl)
    assert torch.equal(before[:, 50:60], after[:, 50:60])


@every_implementation
def test_nan_stays_in_its_sequence(impl):
    case = replace(PLAIN, lengths=((40, 40), (30, 30), (70, 70)))
    tensors, (d_output, d_lse) = case.drawn("cpu")
    wanted = run(case, tensors, (d_output, d_lse), impl)
    for x in (tensors["q"], tensors["k"], tensors["v"], d_output):
        x[:, 40:70] = float("nan")
    found = run(case, tensors, (d_output, d_lse), impl)
    for x, y in zip(found.values(), wanted.values()):
        for part in (slice(0, 40), slice(70, 140)):
            assert torch.equal(x[:, part], y[:, part])


def test_nan_queries_give_nan_lse():
    """Those alone. Torch's operator leaves open what they give."""
    q, k, v = random(*[(1, 9, 1, 16)] * 3)
    q[0, 3] = float("nan")
    output, lse = ps.softmax_attention(q, k, v, return_lse=True, impl="triton")
    for x in (output, lse):
        assert x[0, 3].isnan().all()
        assert x[0, [0, 1, 2, 4, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_first_and_second_derivatives_in_float64(impl):
    leaves = [x.requires_grad_() for x in random((1, 7, 2, 4), (1, 7, 1, 4), (1, 7, 1, 4), dtype=FLOAT64)]
    for return_lse in (True, False):
        function = partial(ps.softmax_attention, window=3, return_lse=return_lse, impl=impl)
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@every_implementation
def test_second_derivatives_in_float32(impl):
    """|gradient| squared, differentiated again, against the formula in float64."""
    case = Attention(B=1, Tq=9, Tk=12, D=8, window=5)

    def twice(impl, dtype):
        tensors, upstream = case.drawn("cpu")
        leaves = [tensors[name].to(dtype).requires_grad_() for name in "qkv"]
        results = ps.softmax_attention(*leaves, window=5, return_lse=True, impl=impl)
        first = torch.autograd.grad(results, leaves, [d.to(dtype) for d in upstream], create_graph=True)
        return [*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)]

    for found, wanted in zip(twice(impl, FLOAT32), twice("reference", FLOAT64)):
        assert (found.double() - wanted).norm() <= arithmetic(FLOAT32) * wanted.norm()


def test_hooks_may_change_strides_of_saved_tensors(monkeypatch):
    monkeypatch.setattr("penstock.call.declared.reads_values", lambda x: False)
    case = replace(PLAIN, strided=True)
    wanted = run(case, *case.drawn("cpu"), "triton")
    turned = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x  # noqa: E731
    for change in (torch.Tensor.contiguous, turned):
        with torch.autograd.graph.saved_tensors_hooks(change, lambda x: x):
            found = run(case, *case.drawn("cpu"), "triton")
        assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in wanted)


@every_implementation
def test_offsets_may_have_strides(impl):
    case = replace(PLAIN, lengths=((9, 9), (21, 21), (40, 40)))
    tensors, upstream = case.drawn("cpu")
    offsets = tensors["cu_seqlens"]
    strided = torch.stack((offsets, offsets + 7), 1)[:, 0]
    found = run(case, tensors | {"cu_seqlens": strided, "cu_seqlens_k": strided}, upstream, impl)
    assert all(torch.equal(x, y) for x, y in zip(found.values(), run(case, tensors, upstream, impl).values()))


@every_implementation
@pytest.mark.parametrize("window", [(1 << 31) - 80, (1 << 31) - 1, (1 << 63) - 1])
@pytest.mark.parametrize(("Tq", "causal"), [(70, True), (70, False), (90, True)])
def test_a_window_wider_than_all_tokens_is_none(window, Tq, causal, impl):
    case = replace(PLAIN, Tq=Tq, causal=causal)
    found, wanted = (run(one, *one.drawn("cpu"), impl) for one in (replace(case, window=window), case))
    assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in wanted)


@every_implementation
def test_a_scale_of_zero_gives_the_mean(impl):
    q, k, v = random(*[(1, 9, 1, 16)] * 3)
    for causal in (True, False):
        found = ps.softmax_attention(q, k, v, scale=0.0, causal=causal, impl=impl)
        assert torch.allclose(found[:, -1], v.mean(1), atol=1e-6)


def test_autocast_casts_as_for_a_matrix_product():
    """And lse stays in float32, computed from the same values."""
    q, k, v = random(*[(1, 9, 1, 16)] * 3)
    _, wanted = ps.softmax_attention(*(x.bfloat16() for x in (q, k, v)), return_lse=True)
    with torch.autocast("cpu", BFLOAT16):
        output, found = ps.softmax_attention(q, k, v, return_lse=True)
    assert (output.dtype, found.dtype) == (BFLOAT16, FLOAT32)
    assert torch.equal(found, wanted)


def test_auto_takes_sdpa_on_a_cpu():
    q, k, v = random(*[(1, 5, 2, 8)] * 3)
    explained = ps.explain("softmax_attention", q, k, v)
    assert (explained.forward, explained.backward) == ("sdpa", "sdpa")


def test_masked_gradients_of_the_oracle_are_finite():
    """The oracle of ``attention`` masks gradients of lse at queries without keys itself."""
    case = Attention(B=1, Tq=9, Tk=4, D=8)
    results, _ = exact(case)
    assert all(x.isfinite().all() for name, x in results.items() if name != "lse")
