"""Short convolutions on a GPU against float64. Run with ``pytest -m gpu``."""

from functools import partial

import pytest
import torch
from convolutions import BATCH, PACKED, Case, cases, check
from formulas import error

from penstock.layers import modes
from penstock.layers.convolution import ShortConvolution, convolution_formula
from penstock.layers.sequences import Sequences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(600)]
kernels = pytest.importorskip("penstock.layers.triton.convolution_launch")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def convolution_of(C: int, dtype: torch.dtype, W: int = 4, bias: bool = True) -> ShortConvolution:
    torch.manual_seed(0)
    one = ShortConvolution(C, W, bias).cuda()
    for parameter in one.parameters():
        torch.nn.init.normal_(parameter)
    return one.to(dtype)


@pytest.mark.parametrize("case", [*cases(*DTYPES), *(Case(4, PACKED, True, True, dtype, 300) for dtype in DTYPES)], ids=str)
def test_results_and_gradients(case: Case) -> None:
    x = torch.empty(1, 75, 1, device="cuda") if case.bounds != BATCH else torch.empty(3, 25, 1, device="cuda")
    sequences = Sequences(x, None if case.bounds == BATCH else torch.tensor(case.bounds).cuda())
    check(case, kernels.Convolution, partial(convolution_formula, sequences=sequences, silu=case.silu), "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_sizes_of_a_model(packed: bool, dtype: torch.dtype) -> None:
    """The middle of a projection of Mamba-2 2.7B; equal bits twice; against the formula in float64."""
    one, B, T, C, total = convolution_of(5376, dtype), 1 if packed else 3, 2900, 5376, 10576
    wide = drawn(B, T, total, dtype=dtype).requires_grad_()
    sequences = Sequences(wide, torch.tensor([0, 2, 2, 900, 901, 2900]).cuda() if packed else None)
    tail, upstream = drawn(sequences.count, 3, C, seed=1, dtype=dtype), drawn(B, T, C, seed=2, dtype=dtype)
    inputs, results = (wide, *one.parameters()), []
    for _ in range(2):
        y, after = one(wide[..., 5120:10496], tail, sequences)
        assert "Convolution" in y.grad_fn.name()
        results.append([y.detach(), after, *torch.autograd.grad(y, inputs, upstream)])
    assert all(torch.equal(one, other) for one, other in zip(*results))
    exact = [leaf.detach().double().requires_grad_() for leaf in inputs]
    x, weight = exact[0][..., 5120:10496], exact[1].squeeze(1)
    true, tails = convolution_formula(x, tail.double(), weight, exact[2], sequences=sequences, silu=True)
    for found, wanted in zip(results[0], (true, tails, *torch.autograd.grad(true, exact, upstream.double()))):
        assert error(found, wanted) < max(torch.finfo(dtype).eps, 4e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("W", [1, 2, 4, 8])
def test_bits_do_not_depend_on_cuts_packing_or_steps(W: int, dtype: torch.dtype) -> None:
    C, T = 4352, 61
    one, x = convolution_of(C, dtype, W), drawn(3, T, C + 160, dtype=dtype)[..., 64 : 64 + C]
    zero = drawn(3, W - 1, C, seed=3, dtype=dtype)
    with torch.no_grad():
        whole, end = one(x, zero, Sequences(x))
        for cut in (0, 1, 2, 5, 32, 60, 61):
            first, tail = one(x[:, :cut], zero, Sequences(x[:, :cut]))
            second, tail = one(x[:, cut:], tail, Sequences(x[:, cut:]))
            assert torch.equal(torch.cat([first, second], 1), whole)
            assert torch.equal(tail, end)
        flat = x.reshape(1, -1, C)
        packed, tail = one(flat, zero, Sequences(flat, torch.arange(4, device="cuda") * T))
        assert torch.equal(packed.view(whole.shape), whole)
        assert torch.equal(tail, end)
        pool, slots = drawn(7, W - 1, C + 64, seed=4, dtype=dtype)[..., 32:-32], torch.tensor([5, 0, 3]).cuda()
        pool[slots], kept = zero, pool.clone()
        for span in (slice(0, 1), slice(1, 2), slice(2, 40), slice(40, 61)):
            y, after = one(x[:, span], pool, Sequences(x[:, span], None, slots, in_place=True))
            assert after is pool
            assert torch.equal(y, whole[:, span])
        assert torch.equal(pool[slots], end)
        others = [1, 2, 4, 6]
        assert torch.equal(pool[others], kept[others])


def test_negative_slots_in_a_graph_that_is_replayed() -> None:
    one, x, slots = convolution_of(300, torch.bfloat16), drawn(4, 1, 300, dtype=torch.bfloat16), torch.tensor([2, -1, 0, 5]).cuda()
    pool, start = drawn(6, 3, 300, seed=1, dtype=torch.bfloat16), drawn(6, 3, 300, seed=1, dtype=torch.bfloat16)

    def step(pool: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = one(x, pool, Sequences(x, None, slots, in_place=True))[0]
        return y

    with torch.no_grad(), modes.in_graph():
        step(pool.clone())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(pool)
        for n in range(5):
            x.copy_(drawn(4, 1, 300, seed=n + 2, dtype=torch.bfloat16))
            slots.copy_(torch.tensor([[2, -1, 0, 5], [-1, 4, 2, 1], [-1, -1, -1, -1]][n % 3]).cuda())
            graph.replay()
            wanted, live = step(start), slots >= 0
            assert torch.equal(captured[live], wanted[live])
            assert torch.equal(pool, start)


@pytest.mark.slow
def test_more_elements_than_int32_counts() -> None:
    """Rows of x, results and gradients behind element 2^31."""
    C, T, dtype = 8192, 2**18 + 40, torch.bfloat16
    one, x = convolution_of(C, dtype), torch.zeros(1, T, C, device="cuda", dtype=dtype)
    x[:, -100:] = drawn(1, 100, C, dtype=dtype)
    x.requires_grad_()
    y, after = one(x, one.initial_state(1, x), Sequences(x))
    (dx,) = torch.autograd.grad(y[:, -50:].float().square().sum(), x)
    part = x.detach()[:, -100:].clone().requires_grad_()
    wanted, tail = one(part, one.initial_state(1, part), Sequences(part))
    (d_part,) = torch.autograd.grad(wanted[:, -50:].float().square().sum(), part)
    assert torch.equal(y[:, -100:], wanted)
    assert torch.equal(after, tail)
    assert torch.equal(dx[:, -100:], d_part)
    assert not dx[:, :-100].any()
