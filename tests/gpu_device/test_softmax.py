"""Softmax attention on a GPU: against the oracle, and against torch's operator. Run with ``pytest -m gpu``."""

from dataclasses import replace

import pytest
import torch
from attention import CASES, Attention, exact
from contract import check_results, run

import penstock as ps
from penstock.gpu.launch import trying

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LARGE = Attention(B=2, Tq=1000, Tk=1000, H=4, G=2, D=128)


def check(case):
    check_results(case, "triton", "cuda")


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.dtype != FLOAT64], ids=str)
def test_equals_the_oracle(case, dtype):
    check(replace(case, dtype=dtype if case.dtype == FLOAT32 else case.dtype))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == FLOAT32 and case.D == 16], ids=str)
def test_hopper_and_plain_kernels_equal_the_oracle(case, D):
    case = replace(case, D=D, dtype=BFLOAT16)
    check(case)
    with trying({}, "attention_fwd", "attention_bwd"):
        check(case)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_many_tiles(D, causal, window):
    lengths = ((700, 700), (129, 900), (1, 400), (513, 513))
    check(replace(LARGE, D=D, causal=causal, window=window, dtype=FLOAT16, lengths=lengths))


@pytest.mark.parametrize("D", [64, 100, 128])
def test_nan_stays_in_its_sequence(D):
    """Tiles reach into the next sequence, where zeros would meet NaN."""
    case = replace(LARGE, D=D, lengths=((70, 70), (30, 30), (100, 100)), dtype=BFLOAT16)
    tensors, (d_output, d_lse) = case.drawn("cuda")
    wanted = run(case, tensors, (d_output, d_lse), "triton")
    for x in (tensors["q"], tensors["k"], tensors["v"], d_output):
        x[:, 70:100] = float("nan")
    found = run(case, tensors, (d_output, d_lse), "triton")
    for name, x in found.items():
        for part in (slice(0, 70), slice(100, 200)):
            assert torch.equal(x[:, part], wanted[name][:, part]), name


def test_views_of_one_projection():
    """q, k and v as views of [B,T,3,H,D]."""
    case = replace(LARGE, H=2, G=2, D=64, dtype=BFLOAT16)
    tensors, upstream = case.drawn("cuda")
    views = dict(zip("qkv", torch.stack([tensors[name] for name in "qkv"], 2).unbind(2)))
    found, wanted = (run(case, given, upstream, "triton") for given in (tensors | views, tensors))
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("D", [16, 20, 64, 100, 128, 192, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_head_sizes(D, window, dtype):
    check(replace(LARGE, D=D, window=window, dtype=dtype))


@pytest.mark.parametrize("sizes", [(1, 1), (8, 1), (6, 3)], ids=str)
def test_grouped_heads(sizes):
    H, G = sizes
    check(replace(LARGE, H=H, G=G, dtype=BFLOAT16))


@pytest.mark.parametrize("causal", [True, False])
def test_packed(causal):
    lengths = ((1, 1), (500, 500), (0, 0), (129, 700), (64, 64), (300, 3))
    check(replace(LARGE, lengths=lengths, causal=causal, dtype=BFLOAT16))


def test_float32_in_one_tf32_product_where_torch_allows_it():
    q, k, v = (LARGE.tensors("cuda")[name] for name in "qkv")
    wanted = ps.softmax_attention(q, k, v)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = ps.softmax_attention(q, k, v)
    finally:
        torch.set_float32_matmul_precision(before)
    assert 0 < (found - wanted).abs().max() < 4e-3 * wanted.abs().max()


def test_auto_takes_triton():
    case = replace(LARGE, dtype=BFLOAT16)
    one, named = (run(case, *case.drawn("cuda"), impl) for impl in ("auto", "triton"))
    assert all(torch.equal(one[name], named[name]) for name in one)
    tensors = case.tensors("cuda")
    assert ps.explain("softmax_attention", *(tensors[name] for name in "qkv")).forward == "triton"


@pytest.mark.parametrize(("H", "D"), [(32, 136), (33, 128)])
def test_offsets_beyond_two_to_the_31(H, D):
    """q has more than 2^31 elements."""
    q = torch.randn(1, (1 << 19) + 5, H, D, device="cuda", dtype=BFLOAT16)
    k = torch.randn(1, 64, 1, D, device="cuda", dtype=BFLOAT16)
    whole = ps.softmax_attention(q, k, k, causal=False)
    last = ps.softmax_attention(q[:, -5:], k, k, causal=False)
    assert torch.equal(whole[:, -5:], last)


def test_compiled_graphs_hold_one_operator():
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=BFLOAT16, requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda q, k, v: ps.softmax_attention(q, k, v, window=100), fullgraph=True)
    found, wanted = compiled(q, k, v), ps.softmax_attention(q, k, v, window=100)
    assert torch.equal(found, wanted)
    for x, y in zip(torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(wanted.sum(), (q, k, v))):
        assert torch.equal(x, y)


@pytest.mark.parametrize("shape", [(2, 2048, 8, 128), (4, 2048, 8, 64)], ids=str)
def test_errors_are_no_larger_than_those_of_sdpa(shape):
    B, T, H, D = shape
    case = Attention(B=B, Tq=T, Tk=T, H=H, G=H, D=D, dtype=BFLOAT16)
    tensors, (d_output, d_lse) = case.drawn("cuda")
    upstream = d_output, torch.zeros_like(d_lse)
    wanted, _ = exact(case, "cuda", upstream)
    found = {impl: run(case, tensors, upstream, impl) for impl in ("triton", "sdpa")}
    for name in ("output", "dq", "dk", "dv"):
        ours, torchs = ((found[impl][name].double() - wanted[name]).norm() for impl in ("triton", "sdpa"))
        assert ours <= 1.05 * torchs, name
