"""Kernels of decode steps on Hopper that begin with a norm. Run with ``pytest -m gpu``."""

import pytest
import torch
from architectures import flat, randomised
from formulas import error

from penstock.layers import linear
from penstock.models import CausalLM, rwkv5, rwkv6

launch = pytest.importorskip("penstock.layers.triton.few_rows_launch")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU"), pytest.mark.timeout(600)]
DTYPES = [torch.bfloat16, torch.float16]


def shift_of(rows, C, parts, dtype):
    """Tokens, a pool with gaps between its rows, and factors. Row 1 is skipped."""
    torch.manual_seed(rows + C)
    x, y, *vectors = (torch.randn(*shape, device="cuda").to(dtype) for shape in [(rows, C)] * 2 + [(C,)] * (2 + parts))
    pool, slots = torch.randn(9, 2, C, device="cuda").to(dtype)[:, 1], torch.tensor([4, -1, 0, 8, 2, 7][:rows], device="cuda")
    return launch.Shift(x, y, *vectors[:2], 1e-3, True, pool, slots, vectors[2:])


def close(found, wanted):
    assert (found.double() - wanted).norm() <= 4 * torch.finfo(found.dtype).eps * wanted.norm()


def started(shift):
    """The norm, and as the kernels have it, with the row of the pool, in float64."""
    total = (shift.x + shift.y).double()
    sums = total - total.mean(-1, keepdim=True)
    normed = sums / (sums.square().mean(-1, keepdim=True) + shift.eps).sqrt() * shift.weight.double() + shift.bias.double()
    last = torch.where((shift.slots >= 0)[:, None], shift.pool[shift.slots.clamp(min=0)], 0).double()
    return normed, normed.to(shift.x.dtype).double(), last


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("C", "M"), [(2048, 32), (1024, 64), (768, 32), (24, 5)])
def test_low_rank_maps_of_norms(C, M, dtype):
    """Values are those of float64; bits of a row depend neither on the number of rows nor on its place."""
    whole = shift_of(4, C, 5, dtype)
    mu, down, up = (torch.randn(*shape, device="cuda") for shape in ((C,), (C, 5 * M), (5, M, C)))
    mu, down, up = mu.to(dtype), (down / C**0.5).to(dtype), (up / M**0.5).to(dtype)
    kept = whole.pool.clone()
    total, shifted, lasts = launch.shifted_low_rank(whole, mu, down, up)
    normed, now, last = started(whole)
    low = ((now + (last - now) * mu.double()).to(dtype).double() @ down.double()).to(dtype).double().tanh().to(dtype).double()
    factors = torch.stack(whole.factors).double()[:, None] + torch.einsum("rnm,nmc->nrc", low.unflatten(1, (5, M)), up.double())
    assert torch.equal(total, whole.x + whole.y)
    close(lasts.normed, normed)
    for y, one in zip(shifted, now + (last - now) * factors):
        close(y, one)
    assert torch.equal(whole.pool, kept)
    for rows in (slice(0, 1), slice(3, 4), slice(1, 3)):
        own = whole._replace(x=whole.x[rows], y=whole.y[rows], slots=whole.slots[rows])
        total, found, alone = launch.shifted_low_rank(own, mu, down, up)
        assert torch.equal(alone.normed, lasts.normed[rows])
        assert all(torch.equal(y, one[rows]) for y, one in zip(found, shifted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("held", [0, 8])
@pytest.mark.parametrize(("K", "counts"), [(2048, (7168, 2048)), (2048, (2048, 2048, 2048, 2000)), (2560, (8960, 2560)), (512, (6401,))])
def test_products_of_norms(K, counts, held, dtype, monkeypatch):
    monkeypatch.setattr("penstock.layers.triton.hopper_shifted_products_launch.HELD", held)
    shift, weights = shift_of(1, K, len(counts), dtype), [(torch.randn(N, K, device="cuda") / K**0.5).to(dtype) for N in counts]
    kept = shift.pool.clone()
    for slot in (4, -1):
        shift.slots.fill_(slot)
        total, found, lasts = launch.shifted_products(shift, weights, complement=slot < 0, relu_squared=True)
        normed, now, last = started(shift)
        factors = [1 - one.double() if slot < 0 else one.double() for one in shift.factors]
        wanted = [(now + (last - now) * m).to(dtype).double() @ weight.double().T for m, weight in zip(factors, weights)]
        wanted[0] = torch.relu(wanted[0]).square()
        assert torch.equal(total, shift.x + shift.y)
        close(lasts.normed, normed)
        for y, one in zip(found, wanted):
            close(y, one)
        assert torch.equal(shift.pool, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_maps_replace_rows_of_shift_states(rows, dtype):
    """None for negative slots; the products do not change."""
    x, gate, normed = (torch.randn(rows, N, device="cuda").to(dtype) for N in (7168, 2048, 2048))
    weight, pool = (torch.randn(2048, 7168, device="cuda") / 80).to(dtype), torch.randn(50, 2, 2048, device="cuda").to(dtype)[:, 1]
    slots, kept = torch.randperm(50, device="cuda")[:rows], pool.clone()
    slots[3::5] = -1
    kept[slots[slots >= 0]] = normed[slots >= 0]
    lasts = launch.Lasts(normed, pool, slots)
    (wanted,), (y,) = (launch.products([x], [weight], gate, fixed=True, lasts=one) for one in (None, lasts))
    assert torch.equal(y, wanted)
    assert torch.equal(pool, kept)


CONFIGS = {
    "rwkv6": rwkv6(vocab_size=13, hidden_size=1024, num_layers=2, intermediate_size=5376),
    "rwkv5.2": rwkv5(vocab_size=13, hidden_size=2048, num_layers=2, intermediate_size=4608, version="5.2"),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3])
def test_graphs_of_steps_equal_those_of_a_cpu(rows, name, monkeypatch):
    """Also with other slots at each replay, which the kernels read before and behind the wait for the kernel ahead."""
    names = []

    def watched(name, whole):
        def called(*given, **options):
            found = whole(*given, **options)
            names.extend([] if found is None else [name])
            return found

        return called

    for one in ("shifted_low_rank", "shifted_products"):
        monkeypatch.setattr(launch, one, watched(one, getattr(launch, one)))
    torch.manual_seed(0)
    model = CausalLM(CONFIGS[name])
    randomised(model)
    ours, theirs = model.to(torch.bfloat16).cuda(), CausalLM(CONFIGS[name]).to(torch.bfloat16)
    theirs.load_state_dict(ours.state_dict())
    theirs = theirs.double()
    ids = torch.randint(13, (rows, 6), generator=torch.Generator().manual_seed(2))
    pool, exact = ours.initial_state(7), theirs.initial_state(7)
    step, slots = ids[:, :1].cuda(), torch.full((rows,), -1, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), linear.in_graph():
        for _ in range(2):
            ours.advance(step, pool, slots=slots)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), linear.in_graph():
        logits = ours.advance(step, pool, slots=slots)
    expected = {"shifted_low_rank"} if name == "rwkv6" else set()
    assert set(names) == expected | ({"shifted_products"} if rows == 1 else set())
    places = torch.tensor([[2, -1, 5], [2, 3, -1], [0, 3, 2], [6, 5, 2], [2, 6, 0], [0, -1, 2]])
    for t in range(6):
        step.copy_(ids[:, t : t + 1])
        slots.copy_(places[t, :rows])
        graph.replay()
        true, live = theirs.advance(ids[:, t : t + 1], exact, slots=places[t, :rows]), places[t, :rows] >= 0
        assert error(logits.cpu()[live], true[live]) < 16 * torch.finfo(torch.bfloat16).eps
    assert all(error(x.cpu(), y) < 16 * torch.finfo(torch.bfloat16).eps for x, y in zip(flat(pool), flat(exact)) if y.any())
