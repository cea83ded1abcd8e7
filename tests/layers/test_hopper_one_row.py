"""Kernels of a decode step of one token on Hopper that begin with a norm, emulated on the CPU."""

import pytest
import torch
from architectures import SIZES, flat, model_of
from emulated import gluon
from formulas import error

from penstock.gpu.target import interpreting
from penstock.layers import decode, modes
from penstock.layers.sequences import Sequences
from penstock.models import CausalLM, rwkv6

launch = pytest.importorskip("penstock.layers.triton.hopper_one_row_launch", reason="needs Gluon")
few_rows = pytest.importorskip("penstock.layers.triton.few_rows_launch")
DTYPES = [torch.bfloat16, torch.float16]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def close(found, wanted, roundings=4):
    assert found.shape == wanted.shape
    assert (found.double() - wanted.double()).norm() <= roundings * torch.finfo(found.dtype).eps * wanted.double().norm()


def shift_of(C, parts, slot, dtype, added=True, centre=True):
    """A token, a pool with gaps between its rows, and factors."""
    x, y = (normal(1, C, dtype=dtype, seed=n) for n in range(2))
    weight, bias, *factors = (normal(C, dtype=dtype, seed=2 + n) for n in range(2 + parts))
    pool = normal(5, 2, C, dtype=dtype)[:, 1]
    return launch.Shift(x, y if added else None, weight, bias if centre else None, 1e-3, centre, pool, torch.tensor([slot]), factors)


def started(shift):
    """The sum, its norm and, as the kernels have them, the rounded norm and the row of the pool, in float64."""
    x, y, weight, bias, eps, centre, pool, slots, _ = shift
    total = x if y is None else (x.float() + y.float()).to(x.dtype)
    sums = total.double() - centre * total.double().mean(-1, keepdim=True)
    normed = sums / (sums.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double() + (0 if bias is None else bias.double())
    last = torch.where((slots >= 0)[:, None], pool[slots.clamp(min=0)], 0).double()
    return total, normed, normed.to(x.dtype).double(), last


def launched(kernel, given, warps, shift):
    """Run all programs. The inputs, also the slot, are not known before the wait for the kernel ahead; no row of the pool changes."""
    kept, tiles = shift.pool.clone(), [gluon.Descriptor(x, known["block_shape"]) for x, known in given.tiles]
    late = [one for one in (shift.x, shift.y, shift.pool, shift.slots) if one is not None]
    gluon.launch(kernel, given.programs, [*tiles, *given.given], given.constants, warps, late=late)
    assert torch.equal(shift.pool.nan_to_num(), kept.nan_to_num())


def empty(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype)


def mixed(shift, mu, down, up):
    """The sum, its norm, and the interpolations of low-rank maps."""
    (R, C), dtype = shift.x.shape, shift.x.dtype
    total = shift.x if shift.y is None else empty(R, C, dtype=dtype)
    results = total, empty(R, C, dtype=dtype), empty(5, R, C, dtype=dtype)
    given = launch.low_rank_arguments(shift, mu, down, up, results, early=True)
    launched(launch.kernels.penstock_shifted_low_rank, given, launch.WARPS, shift)
    return results


def mixed_formula(shift, mu, down, up):
    dtype = shift.x.dtype
    total, normed, now, last = started(shift)
    low = (now + (last - now) * mu.double()).to(dtype).double() @ down.double()
    low = low.to(dtype).double().tanh().to(dtype).double().unflatten(1, up.shape[:2])
    factors = torch.stack(shift.factors).double()[:, None] + torch.einsum("rnm,nmc->nrc", low, up.double())
    return total, normed, now + (last - now) * factors


def low_rank_weights(C, M, dtype):
    return normal(C, dtype=dtype), normal(C, 5 * M, dtype=dtype) / C**0.5, normal(5, M, C, dtype=dtype) / M**0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("added", "centre"), [(True, True), (False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("C", "M", "slot"), [(2048, 32, 3), (24, 5, 0), (600, 16, 4), (1000, 64, -1), (70, 33, 1)])
def test_low_rank_maps_of_norms(C, M, slot, added, centre, dtype):
    shift, weights = shift_of(C, 5, slot, dtype, added, centre), low_rank_weights(C, M, dtype)
    (total, normed, shifted), wanted = mixed(shift, *weights), mixed_formula(shift, *weights)
    assert torch.equal(total, wanted[0])
    close(normed, wanted[1])
    close(shifted, wanted[2])


@pytest.mark.parametrize(("place", "at"), [("x", (0, 7)), ("y", (0, 7)), ("pool", (4, 7)), ("pool", (2, 7))])
def test_nan_in_what_low_rank_maps_read(place, at):
    """All programs of a step have NaN, unless it is in another row of the pool."""
    shift = shift_of(600, 5, 4, torch.bfloat16)
    getattr(shift, place)[at] = float("nan")
    _, normed, shifted = mixed(shift, *low_rank_weights(600, 8, torch.bfloat16))
    assert normed.isnan().all() == (place != "pool")
    assert shifted.isnan().any() == shifted.isnan().all() == (at[0] != 2)


def test_low_rank_maps_that_are_refused():
    def taken(C, M, *counts, parts=5):
        weights = [torch.empty(N, C, dtype=torch.bfloat16, device="meta") for N in counts or (64, C, C, C, C)]
        return launch.takes_low_rank(torch.empty(parts, M, C, device="meta"), weights)

    assert taken(2048, 32)
    assert taken(2048, 5)
    assert taken(1600, 32)
    assert not taken(2560, 32)  # too many weights for registers
    assert not taken(2048, 33)
    assert not taken(256, 65, 64, *[2048] * 4)
    assert not taken(1536, 32)  # K in parts
    assert not taken(2044, 32)
    assert not taken(2048, 32, 8192)
    assert not taken(2048, 32, *[2048] * 4, parts=4)


def multiplied(shift, weights):
    """The sum, its norm, and the products of a channel mix."""
    (R, C), dtype = shift.x.shape, shift.x.dtype
    total = shift.x if shift.y is None else empty(R, C, dtype=dtype)
    results = [total, empty(R, C, dtype=dtype), *(empty(1, len(one), dtype=dtype) for one in weights)]
    launched(launch.kernels.penstock_shifted_products, launch.channel_arguments(shift, weights, results, early=True), 4, shift)
    return results[0], results[1], results[2:]


def multiplied_formula(shift, weights):
    total, normed, now, last = started(shift)
    key, gate = (
        (now + (last - now) * m.double()).to(shift.x.dtype).double() @ weight.double().T for m, weight in zip(shift.factors, weights)
    )
    return total, normed, [torch.relu(key).square(), gate]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("K", "counts"), [(512, (72, 1)), (2048, (128, 65)), (1536, (40, 130)), (2560, (64, 64))])
@pytest.mark.parametrize(("slot", "added", "centre"), [(3, True, True), (-1, False, False), (0, True, False)])
def test_products_of_norms(slot, added, centre, K, counts, dtype):
    shift = shift_of(K, 2, slot, dtype, added, centre)
    weights = [normal(N, K, dtype=dtype, seed=n) / K**0.5 for n, N in enumerate(counts)]
    (total, normed, found), wanted = multiplied(shift, weights), multiplied_formula(shift, weights)
    assert torch.equal(total, wanted[0])
    close(normed, wanted[1])
    for y, one in zip(found, wanted[2]):
        close(y, one)


def test_nan_in_a_weight_of_a_product_stays_in_its_row():
    shift, weights = shift_of(1024, 2, 2, torch.bfloat16), [normal(N, 1024, dtype=torch.bfloat16) for N in (80, 70)]
    weights[0][3, 0] = weights[0][66, 1023] = weights[0][70, 512] = weights[1][65, 5] = float("nan")
    assert [y[0].isnan().nonzero().flatten().tolist() for y in multiplied(shift, weights)[2]] == [[3, 66, 70], [65]]


def test_channel_mixes_that_are_refused():
    def taken(C, F, receptance=None, value=None):
        shapes = (F, C), receptance or (C, C), value or (C, F)
        return launch.takes_channel_mix(*(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes))

    assert taken(2048, 7168)
    assert taken(2048, 4352)
    assert not taken(2048, 4288)  # K in parts
    assert not taken(2000, 7168)
    assert not taken(2048, 7172)
    assert not taken(2048, 7168, receptance=(4096, 2048))
    assert not taken(2048, 7168, value=(2048, 7104))


@pytest.fixture
def taken(kernels_on_a_cpu, no_native_kernels, monkeypatch):
    """The functions that are called while all kernels take tensors on a CPU; those for Hopper are emulated, or formulas where they need
    larger models."""
    names, C = [], SIZES["hidden_size"]

    def low_rank_maps(shift, mu, down, up, weights):
        names.append("low_rank_maps")
        total, normed, shifted = mixed(shift, mu, down, up)
        return total, [one @ weight.T for one, weight in zip(shifted, weights)], few_rows.Lasts(normed, shift.pool, shift.slots)

    def channel_mix(shift, key, receptance, value):
        names.append("channel_mix")
        total, normed, (hidden, gate) = multiplied_formula(shift, [key, receptance])
        few_rows.Lasts(normed.to(shift.x.dtype), shift.pool, shift.slots).write()
        return total, (hidden @ value.double().T * gate.sigmoid()).to(shift.x.dtype)

    for name in ("low_rank", "shifted_norm", "rwkv_step"):
        whole = getattr(few_rows, name)
        monkeypatch.setattr(few_rows, name, lambda *given, name=name, whole=whole, **more: names.append(name) or whole(*given, **more))
    monkeypatch.setattr(few_rows, "on_hopper", lambda device, name: launch if name == "hopper_one_row_launch" else None)
    for one in (low_rank_maps, channel_mix):
        monkeypatch.setattr(launch, one.__name__, one)
        monkeypatch.setattr(launch, "takes_" + one.__name__.removesuffix("_maps"), lambda *given: True)
    monkeypatch.setattr(decode, "WIDTH", C)
    return names


@pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("slots", [[2], [-1], [2, -1, 0]], ids=str)
@pytest.mark.parametrize("name", ["rwkv6", "rwkv5.2"])
def test_decode_steps_of_models(name, slots, hook, request):
    """Three steps are those of plain PyTorch, also where no kernel of a step replaces the rows of shift states."""
    model, results, slots = model_of(name, torch.float16), [], torch.tensor(slots)
    if hook:
        for layer in model.layers:
            layer.mixer.ln_x.register_forward_hook(lambda module, given, y: None)
            layer.channel.value.register_forward_hook(lambda module, given, y: None)
    ids = torch.randint(SIZES["vocab_size"], (len(slots), 3), generator=torch.Generator().manual_seed(2))
    live = (slots >= 0).nonzero()[:, 0]
    for kernels in (False, True):
        names, pool = request.getfixturevalue("taken") if kernels else [], model.initial_state(4)
        with modes.in_graph():
            logits = [model.advance(ids[:, t : t + 1], pool, slots=slots)[live] for t in range(3)]
        results.append([torch.cat(logits), *flat(pool)])
    for plain, found in zip(*results):
        assert plain.any() == found.any()
        assert not plain.any() or error(found, plain) < 5e-3
    expected = set() if hook else {"rwkv_step"}
    if name == "rwkv6" and len(slots) == 1:
        expected |= {"low_rank_maps", "shifted_norm" if hook else "channel_mix"}
    else:
        expected |= {"shifted_norm"} | ({"low_rank"} if name == "rwkv6" else set())
    assert set(names) == expected


def test_only_steps_of_one_token_in_graphs_begin_so(taken):
    model = model_of("rwkv6", torch.float16)
    norm, mixer, channel = model.layers[0].mixer_norm, model.layers[0].mixer, model.layers[0].channel
    few, maps = mixer._maps(), [channel.key, channel.receptance, channel.value]

    def found(tokens=1, slots=(0,), in_place=True, dtype=torch.float16, norm=norm, rows=3, mu=channel.time_maa_k):
        C = SIZES["hidden_size"]
        x, pool = normal(len(slots or (0,)), tokens, C, dtype=dtype), normal(rows, C, dtype=dtype)
        sequences = Sequences(x, None, None if slots is None else torch.tensor(slots), in_place=in_place)
        factors = [mu, *mixer._factors()[1:]]
        weights = mixer.time_maa_x, mixer.time_maa_w1, factors, mixer.time_maa_w2, mixer.time_decay_w1
        first = decode.low_rank_maps(x, None, norm, pool, sequences, *weights, few)
        second = decode.channel_mix(x, None, norm, pool, sequences, (mu, channel.time_maa_r), maps)
        assert (first is None) == (second is None)
        return first is not None

    with torch.no_grad():
        assert not found()
        with modes.rows_alike(), modes.in_graph():
            assert not found()
        with modes.in_graph():
            assert found()
            assert not found(tokens=2)
            assert not found(slots=(0, 1))
            assert not found(slots=None)
            assert not found(in_place=False)
            assert not found(dtype=torch.float32)
            assert not found(norm=torch.nn.Identity())
            assert not found(rows=0)
            assert not found(mu=channel.time_maa_k * 1)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(decode, "WIDTH", 32)
                assert not found()
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(few_rows, "on_hopper", lambda device, name: None)
                assert not found()
            for one in (mixer.gate, channel.receptance):
                one.register_forward_hook(lambda module, given, y: None)
            assert not found()
    with modes.in_graph():
        assert not found()
    assert taken == ["low_rank_maps", "channel_mix"]


class Launcher:
    """A kernel, which ``run`` launches on a grid."""

    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        return lambda *given, **constants: self.run(grid, given, constants)


@pytest.mark.slow
def test_steps_of_one_token_at_their_width(kernels_on_a_cpu, monkeypatch):
    """Both functions, with all of their launches emulated."""
    torch.manual_seed(0)
    model = CausalLM(rwkv6(vocab_size=13, hidden_size=2048, num_layers=1, intermediate_size=4352, head_size=64)).to(torch.bfloat16)
    norm, mixer, channel, names = model.layers[0].mixer_norm, model.layers[0].mixer, model.layers[0].channel, []
    with torch.no_grad():
        for one in (*mixer.parameters(), *channel.parameters()):
            one.copy_(normal(*one.shape) / (one.shape[-1] ** 0.5 if one.dim() == 2 else 2))

    def emulated(x, kernel):
        def run(grid, given, constants):
            names.append(kernel.__name__)
            options = {name: constants.pop(name) for name in ("num_warps", "maxnreg", "launch_pdl") if name in constants}
            gluon.launch(kernel, grid, list(given), constants, options["num_warps"])

        return Launcher(run)

    for module in (launch, launch.maps):
        monkeypatch.setattr(module, "on_device_of", emulated)
        monkeypatch.setattr(module, "described", lambda x, known: gluon.Descriptor(x, known["block_shape"]))
    monkeypatch.setattr(few_rows, "on_hopper", lambda device, name: launch)
    x, pool = normal(1, 1, 2048, dtype=torch.bfloat16), normal(3, 2048, dtype=torch.bfloat16)
    sequences, kept = Sequences(x, None, torch.tensor([1]), in_place=True), pool.clone()
    factors, maps = mixer._factors(), [channel.key, channel.receptance, channel.value]
    weights = mixer.time_maa_x, mixer.time_maa_w1, factors, mixer.time_maa_w2
    with torch.no_grad(), modes.in_graph():
        total, results, lasts = decode.low_rank_maps(x, x, norm, pool, sequences, *weights, mixer.time_decay_w1, mixer._maps())
        assert torch.equal(pool, kept)
        summed, found = decode.channel_mix(x, x, norm, pool, sequences, channel._factors(), maps)
    assert names == ["penstock_shifted_low_rank", "penstock_products_hopper", "penstock_shifted_products", "penstock_products_hopper"]
    assert torch.equal(pool[1:2], lasts.normed)
    assert torch.equal(pool[::2], kept[::2])
    assert torch.equal(total, x + x)
    assert torch.equal(summed, total)
    kinds = norm.weight.detach(), norm.bias.detach(), norm.eps, True, kept, torch.tensor([1])
    shift = launch.Shift(x[0], x[0], *kinds, [one.detach().view(-1) for one in factors])
    wanted = mixed_formula(shift, mixer.time_maa_x.detach().view(-1), mixer.time_maa_w1.detach(), mixer.time_maa_w2.detach())[2]
    down = [mixer.time_decay_w1.T, *(one.weight for one in mixer._maps())]
    for y, one, weight in zip(results, wanted.to(torch.bfloat16), down):
        close(y[0], one.double() @ weight.detach().double().T, 6)
    shift = shift._replace(factors=[one.detach().view(-1) for one in channel._factors()])
    hidden, gate = multiplied_formula(shift, [one.weight.detach() for one in maps[:2]])[2]
    close(found[0], hidden.to(torch.bfloat16).double() @ channel.value.weight.detach().double().T * gate.sigmoid(), 6)
