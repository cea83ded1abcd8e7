"""Softmax attention on a GPU: ``pytest -m gpu tests/test_gpu_softmax.py``."""

from dataclasses import replace

import pytest
import torch
from test_softmax import CASES, Case, check, draw, run

import penstock as ps
from penstock.recurrence.triton import launch
from penstock.softmax.triton import hopper

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LARGE = Case(B=2, Tq=1000, Tk=1000, H=4, G=2, D=128)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.dtype != FLOAT64], ids=str)
def test_equals_the_oracle(case, dtype):
    check(replace(case, dtype=dtype if case.dtype == FLOAT32 else case.dtype), "triton", device="cuda")


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == FLOAT32 and case.D == 16], ids=str)
def test_kernels_of_one_gpu_and_of_all_equal_the_oracle(case, D, monkeypatch):
    check(replace(case, D=D, dtype=BFLOAT16), "triton", device="cuda")
    monkeypatch.setattr(hopper, "suits", lambda *_: False)
    launch._prepared.clear()
    check(replace(case, D=D, dtype=BFLOAT16), "triton", device="cuda")
    launch._prepared.clear()


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_long_walks(D, causal, window):
    lengths = ((700, 700), (129, 900), (1, 400), (513, 513))
    check(replace(LARGE, D=D, causal=causal, window=window, dtype=FLOAT16, lengths=lengths), "triton", device="cuda")


@pytest.mark.parametrize("D", [64, 100, 128])
def test_what_is_no_number_stays_in_its_sequence(D):
    """Tiles reach into the sequence behind; there zeros would meet NaN."""
    lengths = ((70, 70), (30, 30), (100, 100))
    a, d_output, d_lse = draw(replace(LARGE, D=D, lengths=lengths, dtype=BFLOAT16), "cuda")
    wanted = run(a, "triton", d_output, d_lse)
    for x in (a.q, a.k, a.v, d_output):
        x[:, 70:100] = float("nan")
    found = run(a, "triton", d_output, d_lse)
    for x, y in zip(found.values(), wanted.values()):
        for part in (slice(0, 70), slice(100, 200)):
            assert torch.equal(x[:, part], y[:, part])


def test_rows_of_one_projection_need_no_copy():
    """q, k and v as views of [B,T,3,H,D]."""
    a, d_output, d_lse = draw(replace(LARGE, H=2, G=2, D=64, dtype=BFLOAT16), "cuda")
    q, k, v = torch.stack((a.q, a.k, a.v), 2).unbind(2)
    found, wanted = (run(one, "triton", d_output, d_lse) for one in (replace(a, q=q, k=k, v=v), a))
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("D", [16, 20, 64, 100, 128, 192, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_head_sizes(D, window, dtype):
    check(replace(LARGE, D=D, window=window, dtype=dtype), "triton", device="cuda")


@pytest.mark.parametrize("sizes", [(1, 1), (8, 1), (6, 3)], ids=str)
def test_grouped_heads(sizes):
    H, G = sizes
    check(replace(LARGE, H=H, G=G, dtype=BFLOAT16), "triton", device="cuda")


@pytest.mark.parametrize("causal", [True, False])
def test_packed(causal):
    lengths = ((1, 1), (500, 500), (0, 0), (129, 700), (64, 64), (300, 3))
    check(replace(LARGE, lengths=lengths, causal=causal, dtype=BFLOAT16), "triton", device="cuda")


def test_float32_in_one_tf32_product_where_torch_allows_it():
    a, *_ = draw(LARGE, "cuda")
    wanted = ps.softmax_attention(a.q, a.k, a.v)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = ps.softmax_attention(a.q, a.k, a.v)
    finally:
        torch.set_float32_matmul_precision(before)
    assert 0 < (found - wanted).abs().max() < 4e-3 * wanted.abs().max()


def test_it_is_chosen_and_repeatable_bit_by_bit():
    a, d_output, d_lse = draw(replace(LARGE, dtype=BFLOAT16), "cuda")
    one, other, named = (run(a, impl, d_output, d_lse) for impl in ("auto", "auto", "triton"))
    for name in one:
        assert torch.equal(one[name], other[name])
        assert torch.equal(one[name], named[name])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_and_all_can_be_captured():
    lengths = ((70, 70), (1, 1), (200, 200))
    a, d_output, _ = draw(replace(LARGE, lengths=lengths, dtype=BFLOAT16), "cuda")

    def step():
        q, k, v = (x.detach().requires_grad_() for x in (a.q, a.k, a.v))
        output = ps.softmax_attention(q, k, v, cu_seqlens=a.cu_seqlens)
        return output, *torch.autograd.grad(output, (q, k, v), d_output)

    wanted = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(found, wanted):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("H", "D"), [(32, 136), (33, 128)])
def test_long_sequences_have_64_bit_offsets(H, D):
    """q has more than 2^31 elements."""
    q = torch.randn(1, (1 << 19) + 5, H, D, device="cuda", dtype=BFLOAT16)
    k = torch.randn(1, 64, 1, D, device="cuda", dtype=BFLOAT16)
    whole = ps.softmax_attention(q, k, k, causal=False)
    last = ps.softmax_attention(q[:, -5:], k, k, causal=False)
    assert torch.equal(whole[:, -5:], last)


def test_it_compiles_whole():
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=BFLOAT16, requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda q, k, v: ps.softmax_attention(q, k, v, window=100), fullgraph=True)
    found, wanted = compiled(q, k, v), ps.softmax_attention(q, k, v, window=100)
    assert torch.equal(found, wanted)
    for x, y in zip(torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(wanted.sum(), (q, k, v))):
        assert torch.equal(x, y)


@pytest.mark.parametrize("shape", [(2, 2048, 8, 128), (4, 2048, 8, 64)], ids=str)
def test_errors_are_no_larger_than_those_of_torchs_operator(shape):
    B, T, H, D = shape
    case = Case(B=B, Tq=T, Tk=T, H=H, G=H, D=D, dtype=BFLOAT16)
    a, d_output, d_lse = draw(case, "cuda")
    from test_softmax import exact

    wanted, _ = exact(a, d_output, torch.zeros_like(d_lse))
    found = {impl: run(a, impl, d_output, torch.zeros_like(d_lse)) for impl in ("triton", "sdpa")}
    for name in ("output", "dq", "dk", "dv"):
        ours, torchs = ((found[impl][name].double() - wanted[name]).norm() for impl in ("triton", "sdpa"))
        assert ours <= 1.05 * torchs, name
