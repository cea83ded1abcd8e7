"""The CUDA implementation on a GPU: exact, repeatable, and never waiting. Run with ``pytest -m gpu``."""

import threading

import pytest
import torch
from penstock.functional import _run
from test_gpu import hold, strong

import penstock as ps
from penstock.bench import ladder
from penstock.verify.inputs import Inputs, Shape, inputs
from penstock.verify.oracle import error, exact_forward

pytest.importorskip("cuda.core")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(600)]

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
VARIANTS = ["rwkv5", "rwkv6"]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head", [32, 64, 128])
def test_head_sizes_and_dtypes(variant, head, dtype):
    """Several sequences, each with a state of its own."""
    hold(inputs(variant, Shape(3, 300, 2, head, head), dtype, "cuda"), "cuda")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 15, 16, 17, 54, 63, 65, 1000, 4100])
def test_lengths(variant, T):
    hold(inputs(variant, Shape(2, T, 2, 64, 64), FLOAT32, "cuda"), "cuda")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("which", ["mixture", "gone", "few", "zero"])
@pytest.mark.parametrize("head", [64, 128])
def test_extreme_decays(variant, which, head):
    hold(strong(inputs(variant, Shape(2, 200, 2, head, head), FLOAT32, "cuda"), which), "cuda")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed(variant, reverse):
    packed = torch.tensor([0, 0, 5, 70, 70, 71, 900, 1024], device="cuda")
    hold(inputs(variant, Shape(1, 1024, 4, 64, 64), BFLOAT16, "cuda"), "cuda", packed, reverse)


def test_the_layout_of_hugging_face_models_is_taken_as_it_is():
    """Slices of one projection [B,T,4 * H * n], viewed by heads: equal to contiguous copies, bit for bit."""
    B, T, H, n = 2, 100, 4, 64
    wide = torch.randn(B, T, 4 * H * n, device="cuda")
    wide[..., 3 * H * n :] = torch.nn.functional.logsigmoid(wide[..., 3 * H * n :])
    r, k, v, w = (x.unflatten(-1, (H, n)) for x in wide.chunk(4, -1))
    u = torch.randn(H, n, device="cuda")
    assert not any(x.is_contiguous() for x in (r, k, v, w))
    found = ps.rwkv6(r, k, v, w, u, impl="cuda").output
    assert torch.equal(found, ps.rwkv6(*(x.contiguous() for x in (r, k, v, w)), u, impl="cuda").output)


def call(x: Inputs, packed: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Forward and backward; what they give."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.u)]
    output = _run(x.variant, *leaves, None, None, True, packed, False, "cuda").output
    return [output.detach(), *torch.autograd.grad(output, leaves, x.v)]


def step(x: Inputs, pool: torch.Tensor, slots: torch.Tensor, impl: str = "cuda") -> torch.Tensor:
    with torch.no_grad():
        return ps.decode_step(x.variant, x.q, x.k, x.v, x.g, x.u, state=pool, slots=slots, impl=impl)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_steps(variant, dtype):
    x, slots = inputs(variant, Shape(3, 2, 2, 64, 64), dtype, "cuda"), torch.tensor([2, -1, 0], device="cuda")
    pool = torch.randn(4, 2, 64, 64, device="cuda")
    exact = pool.clone()
    found, wanted = step(x, pool, slots), step(x, exact, slots, "reference")
    assert error(found, wanted.double()) < 1e-6 + torch.finfo(dtype).eps
    assert error(pool, exact.double()) < 1e-6
    assert not found[1].any()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_waits_for_the_device(variant):
    x, one = inputs(variant, Shape(1, 333, 2, 64, 64), BFLOAT16, "cuda"), inputs(variant, Shape(3, 2, 2, 64, 64), BFLOAT16, "cuda")
    packed = torch.tensor([0, 100, 333], device="cuda")
    pool, slots = torch.zeros(4, 2, 64, 64, device="cuda"), torch.tensor([2, -1, 0], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            call(x)
            call(x, packed)
            step(one, pool, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("variant", VARIANTS)
def test_calls_can_be_captured(variant):
    """A CUDA graph replays forward, backward and a decode step on new values."""
    x, other = (inputs(variant, Shape(1, 200, 2, 64, 64), BFLOAT16, "cuda", seed=seed) for seed in (0, 1))
    packed = torch.tensor([0, 50, 200], device="cuda")
    one = inputs(variant, Shape(3, 1, 2, 64, 64), BFLOAT16, "cuda")
    pool, slots = torch.zeros(4, 2, 64, 64, device="cuda"), torch.tensor([2, -1, 0], device="cuda")
    everything = lambda y: [*call(y), *call(y, packed)]  # noqa: E731
    wanted = [everything(x), everything(other)]
    step(one, pool, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = everything(x)
        token = step(one, pool, slots)
    for values, expected in zip((x, other), wanted):
        for name, tensor in values.tensors.items():
            x.tensors[name].copy_(tensor)
        pool.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        again = pool.clone()
        pool.zero_()
        assert torch.equal(token, step(one, pool, slots))
        assert torch.equal(pool, again)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_two_runs_are_bitwise_equal(variant, dtype):
    x = inputs(variant, Shape(4, 777, 4, 64, 64), dtype, "cuda")
    first = call(x)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, call(x)))


def test_another_stream_and_another_thread():
    x, found = inputs("rwkv6", Shape(2, 500, 4, 64, 64), BFLOAT16, "cuda"), []
    wanted = call(x)
    torch.cuda.synchronize()

    def run():
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(call(x))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(a, b) for one in found for a, b in zip(wanted, one))


@pytest.mark.parametrize("name", ladder.RUNGS)
def test_every_rung_of_the_ladder_equals_the_oracle(name):
    x = inputs("rwkv6", Shape(2, 200, 3, 64, 64), FLOAT32, "cuda")
    assert error(ladder.rung(name, x, "fwd").forward(x), exact_forward(x)[0]) < ladder.BUDGET
