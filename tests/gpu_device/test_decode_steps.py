"""Kernels of a decode step of one token on Hopper that begin with a norm. Run with ``pytest -m gpu``."""

import pytest
import torch
from architectures import flat, randomised
from formulas import error

from penstock.layers import linear, modes
from penstock.models import CausalLM, rwkv6

launch = pytest.importorskip("penstock.layers.triton.hopper_one_row_launch", reason="needs Gluon")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU"), pytest.mark.timeout(600)]
DTYPES = [torch.bfloat16, torch.float16]


def shift_of(C, parts, dtype):
    """A token, a pool with gaps between its rows, and factors."""
    torch.manual_seed(C)
    x, y, *vectors = (torch.randn(*shape, device="cuda").to(dtype) for shape in [(1, C)] * 2 + [(C,)] * (2 + parts))
    pool = torch.randn(9, 2, C, device="cuda").to(dtype)[:, 1]
    return launch.Shift(x, y, *vectors[:2], 1e-3, True, pool, torch.tensor([4], device="cuda"), vectors[2:])


def normal(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


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
@pytest.mark.parametrize("slot", [4, 0, -1])
@pytest.mark.parametrize(("C", "M"), [(2048, 32), (1024, 64), (768, 32), (24, 5)])
def test_low_rank_maps_of_norms(C, M, slot, dtype):
    """And the linear maps of their results. The pool does not change."""
    shift = shift_of(C, 5, dtype)
    shift.slots.fill_(slot)
    mu, down, up, kept = normal(C, dtype=dtype), normal(C, 5 * M, dtype=dtype), normal(5, M, C, dtype=dtype), shift.pool.clone()
    down, up = down / C**0.5, up / M**0.5
    weights = [normal(C, 64, dtype=dtype).T, *(normal(C + 8 * n, C, dtype=dtype) for n in range(4))]
    total, found, lasts = launch.low_rank_maps(shift, mu, down, up, weights)
    normed, now, last = started(shift)
    low = ((now + (last - now) * mu.double()).to(dtype).double() @ down.double()).to(dtype).double().tanh().to(dtype).double()
    factors = torch.stack(shift.factors).double()[:, None] + torch.einsum("rnm,nmc->nrc", low.unflatten(1, (5, M)), up.double())
    assert torch.equal(total, shift.x + shift.y)
    close(lasts.normed, normed)
    for y, one, weight in zip(found, (now + (last - now) * factors).to(dtype), weights):
        close(y, one.double() @ weight.double().T)
    assert torch.equal(shift.pool, kept)
    lasts.write()
    if slot >= 0:
        kept[slot] = lasts.normed
    assert torch.equal(shift.pool, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slot", [4, 0, -1])
@pytest.mark.parametrize(("C", "F"), [(2048, 7168), (2560, 8960), (512, 6400)])
def test_channel_mixes_of_norms(C, F, slot, dtype):
    """The norm replaces the row of the pool, except for a negative slot."""
    shift = shift_of(C, 2, dtype)
    shift.slots.fill_(slot)
    key, receptance, value = (normal(N, K, dtype=dtype) / K**0.5 for N, K in ((F, C), (C, C), (C, F)))
    assert launch.takes_channel_mix(key, receptance, value)
    (normed, now, last), kept = started(shift), shift.pool.clone()
    total, found = launch.channel_mix(shift, key, receptance, value)
    hidden, gate = (
        (now + (last - now) * m.double()).to(dtype).double() @ weight.double().T for m, weight in zip(shift.factors, (key, receptance))
    )
    close(found, torch.relu(hidden).square().to(dtype).double() @ value.double().T * gate.sigmoid())
    assert torch.equal(total, shift.x + shift.y)
    if slot >= 0:
        close(shift.pool[slot], normed[0])
        kept[slot] = shift.pool[slot]
    assert torch.equal(shift.pool, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 8, 9])
def test_five_maps_of_few_rows_in_graphs(rows, dtype):
    """K of those of 5 to 8 rows is in two parts."""
    inputs = [normal(rows, 2048, dtype=dtype) for _ in range(5)]
    weights = [torch.nn.Parameter(normal(N, 2048, dtype=dtype) / 2048**0.5) for N in (64, 2048, 2048, 2048, 2048)]
    weights[0] = torch.nn.Parameter(weights[0].detach().T.contiguous()).T
    with torch.no_grad(), modes.in_graph():
        found = linear.linears(inputs, weights)
    for y, x, weight in zip(found, inputs, weights):
        close(y, x.double() @ weight.detach().double().T)


@pytest.mark.parametrize("rows", [1, 3])
def test_graphs_of_steps_equal_those_of_a_cpu(rows, monkeypatch):
    """Also with other slots at each replay, which the kernels read before and behind the wait for the kernel ahead."""
    names, config = [], rwkv6(vocab_size=13, hidden_size=2048, num_layers=2, intermediate_size=4352)

    def watched(name, whole):
        return lambda *given: names.append(name) or whole(*given)

    for one in ("low_rank_maps", "channel_mix"):
        monkeypatch.setattr(launch, one, watched(one, getattr(launch, one)))
    torch.manual_seed(0)
    model = CausalLM(config)
    randomised(model)
    with torch.no_grad():  # at their size, roundings of 16 bits would change logits by up to half of their size
        for name, parameter in model.named_parameters():
            parameter.mul_(0.1 if name.endswith("_w2") else 0.3 if name.endswith("output.weight") else 1.0)
    ours, theirs = model.to(torch.bfloat16).cuda(), CausalLM(config).to(torch.bfloat16)
    theirs.load_state_dict(ours.state_dict())
    theirs = theirs.double()
    ids = torch.randint(13, (rows, 6), generator=torch.Generator().manual_seed(2))
    pool, exact = ours.initial_state(7), theirs.initial_state(7)
    step, slots = ids[:, :1].cuda(), torch.full((rows,), -1, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), modes.in_graph():
        for _ in range(2):
            ours.advance(step, pool, slots=slots)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), modes.in_graph():
        logits = ours.advance(step, pool, slots=slots)
    assert set(names) == ({"low_rank_maps", "channel_mix"} if rows == 1 else set())
    places = torch.tensor([[2, -1, 5], [2, 3, -1], [0, 3, 2], [6, 5, 2], [2, 6, 0], [0, -1, 2]])
    for t in range(6):
        step.copy_(ids[:, t : t + 1])
        slots.copy_(places[t, :rows])
        graph.replay()
        true, live = theirs.advance(ids[:, t : t + 1], exact, slots=places[t, :rows]), places[t, :rows] >= 0
        assert error(logits.cpu()[live], true[live]) < 8 * torch.finfo(torch.bfloat16).eps
    assert all(error(x.cpu(), y) < 8 * torch.finfo(torch.bfloat16).eps for x, y in zip(flat(pool), flat(exact)) if y.any())
