"""Kernels of decode steps on Hopper that begin with a norm, emulated on the CPU."""

import pytest
import torch
from architectures import SIZES, flat, model_of
from emulated import gluon
from formulas import error

from penstock.gpu.target import interpreting
from penstock.layers import convolution, decode, fused, linear
from penstock.layers.sequences import Sequences

low_rank = pytest.importorskip("penstock.layers.triton.hopper_low_rank_launch", reason="needs Gluon")
products = pytest.importorskip("penstock.layers.triton.hopper_shifted_products_launch", reason="needs Gluon")
launch = pytest.importorskip("penstock.layers.triton.few_rows_launch")
DTYPES = [torch.bfloat16, torch.float16]
MULTIPROCESSORS = 132


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def close(found, wanted, roundings=4):
    assert found.shape == wanted.shape
    assert (found.double() - wanted.double()).norm() <= roundings * torch.finfo(found.dtype).eps * wanted.double().norm()


def shift_of(rows, C, parts, slots, dtype, added=True, centre=True):
    """Tokens, a pool with gaps between its rows, and factors."""
    x, y = (normal(rows, C, dtype=dtype, seed=n) for n in range(2))
    weight, bias, *factors = (normal(C, dtype=dtype, seed=2 + n) for n in range(2 + parts))
    pool = normal(5, 2, C, dtype=dtype)[:, 1]
    return launch.Shift(x, y if added else None, weight, bias if centre else None, 1e-3, centre, pool, torch.tensor(slots), factors)


def started(shift):
    """The sum, its norm and, as the kernels have them, the rounded norm and the row of the pool, in float64."""
    x, y, weight, bias, eps, centre, pool, slots, _ = shift
    total = x if y is None else (x.float() + y.float()).to(x.dtype)
    sums = total.double() - centre * total.double().mean(-1, keepdim=True)
    normed = sums / (sums.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double() + (0 if bias is None else bias.double())
    last = torch.where((slots >= 0)[:, None], pool[slots.clamp(min=0)], 0).double()
    return total, normed, normed.to(x.dtype).double(), last


def launched(kernel, given, warps, shift):
    """Run all programs. The inputs, also the slots, are not known before the wait for the kernel ahead; no row of the pool changes."""
    kept, tiles = shift.pool.clone(), [gluon.Descriptor(x, known["block_shape"]) for x, known in getattr(given, "tiles", [])]
    late = [one for one in (shift.x, shift.y, shift.pool, shift.slots) if one is not None]
    gluon.launch(kernel, given.programs, [*tiles, *given.given], given.constants, warps, late=late)
    assert torch.equal(shift.pool.nan_to_num(), kept.nan_to_num())


def empty(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype)


def mixed(shift, mu, down, up, multiprocessors=MULTIPROCESSORS):
    """What ``shifted_low_rank`` returns."""
    (R, C), dtype = shift.x.shape, shift.x.dtype
    total = shift.x if shift.y is None else empty(R, C, dtype=dtype)
    results = total, empty(R, C, dtype=dtype), empty(len(up), R, C, dtype=dtype)
    given = low_rank.arguments(shift, mu, down, up, results, multiprocessors, early=True)
    launched(low_rank.hopper_low_rank.penstock_shifted_low_rank, given, low_rank.WARPS, shift)
    return results


def mixed_formula(shift, mu, down, up):
    dtype = shift.x.dtype
    total, normed, now, last = started(shift)
    low = (now + (last - now) * mu.double()).to(dtype).double() @ down.double()
    low = low.to(dtype).double().tanh().to(dtype).double().unflatten(1, up.shape[:2])
    factors = torch.stack(shift.factors).double()[:, None] + torch.einsum("rnm,nmc->nrc", low, up.double())
    return total, normed, now + (last - now) * factors


def low_rank_weights(C, M, parts, dtype):
    return normal(C, dtype=dtype), normal(C, parts * M, dtype=dtype) / C**0.5, normal(parts, M, C, dtype=dtype) / M**0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("added", "centre"), [(True, True), (False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("C", "M", "parts", "slots"), [(2048, 32, 5, [3]), (24, 5, 5, [3, -1, 0]), (600, 16, 2, [4, 1]), (1000, 64, 1, [-1]), (70, 33, 3, [0])]
)
def test_low_rank_maps_of_norms(C, M, parts, slots, added, centre, dtype):
    shift, weights = shift_of(len(slots), C, parts, slots, dtype, added, centre), low_rank_weights(C, M, parts, dtype)
    assert low_rank.takes(len(slots), C, parts, M, MULTIPROCESSORS)
    wanted = mixed_formula(shift, *weights)
    for multiprocessors in (MULTIPROCESSORS, 1):  # 256 and 512 columns a program
        total, normed, shifted = mixed(shift, *weights, multiprocessors)
        assert torch.equal(total, wanted[0])
        close(normed, wanted[1])
        close(shifted, wanted[2])


def test_bits_of_low_rank_maps_do_not_depend_on_other_rows():
    shift, weights = shift_of(3, 72, 5, [2, -1, 0], torch.bfloat16), low_rank_weights(72, 8, 5, torch.bfloat16)
    whole = mixed(shift, *weights)
    for n in range(3):
        own = shift._replace(x=shift.x[n : n + 1], y=shift.y[n : n + 1], slots=shift.slots[n : n + 1])
        alone = mixed(own._replace(x=own.x.clone(), y=own.y.clone(), slots=own.slots.clone()), *weights)
        assert torch.equal(alone[1], whole[1][n : n + 1])
        assert torch.equal(alone[2], whole[2][:, n : n + 1])


@pytest.mark.parametrize("place", ["x", "y", "pool"])
def test_nan_in_one_row_of_low_rank_maps_stays_there(place):
    weights, results = low_rank_weights(72, 8, 5, torch.bfloat16), []
    for value in (0.0, float("nan")):
        shift = shift_of(3, 72, 5, [2, 4, 0], torch.bfloat16)
        getattr(shift, place)[4 if place == "pool" else 1, 7] = value
        results.append(mixed(shift, *weights))
    (_, kept, wanted), (_, normed, shifted) = results
    assert torch.equal(normed[[0, 2]], kept[[0, 2]])
    assert torch.equal(shifted[:, [0, 2]], wanted[:, [0, 2]])
    assert normed[1].isnan().all() == (place != "pool")
    assert shifted[:, 1].isnan().all()


def test_low_rank_maps_whose_weights_do_not_fit_are_refused():
    yes = [(1, 2048, 5, 32), (4, 2048, 5, 32), (1, 1024, 5, 64), (4, 24, 5, 5)]
    no = [(1, 2560, 5, 32), (1, 4096, 5, 64), (1, 2048, 5, 33), (7, 2048, 5, 32), (1, 256, 1, 65)]
    assert [one for one in yes if not low_rank.takes(*one, MULTIPROCESSORS)] == []
    assert [one for one in no if low_rank.takes(*one, MULTIPROCESSORS)] == []
    assert not low_rank.takes(4, 2048, 5, 32, 40)


def multiplied(shift, weights, complement=False, relu_squared=False):
    """What ``shifted_products`` returns."""
    (R, C), dtype = shift.x.shape, shift.x.dtype
    total = shift.x if shift.y is None else empty(R, C, dtype=dtype)
    results = [total, empty(R, C, dtype=dtype), *(empty(1, len(one), dtype=dtype) for one in weights)]
    given = products.arguments(shift, weights, results, complement=complement, relu_squared=relu_squared, early=True)
    launched(products.kernels.penstock_shifted_products, given, 4, shift)
    return results[0], results[1], results[2:]


def multiplied_formula(shift, weights, complement=False, relu_squared=False):
    total, normed, now, last = started(shift)
    factors = [1 - one.double() if complement else one.double() for one in shift.factors]
    found = [(now + (last - now) * m).to(shift.x.dtype).double() @ weight.double().T for m, weight in zip(factors, weights)]
    return total, normed, [torch.relu(found[0]).square(), *found[1:]] if relu_squared else found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("held", [0, 8])
@pytest.mark.parametrize(("K", "counts"), [(512, (72,)), (2048, (128, 65)), (1536, (40, 16, 33, 1, 70)), (2560, (1, 64, 65))])
@pytest.mark.parametrize(("slot", "added", "other"), [(3, True, True), (-1, False, False)])
def test_products_of_norms(slot, added, other, K, counts, held, dtype, monkeypatch):
    monkeypatch.setattr(products, "HELD", held)
    shift = shift_of(1, K, len(counts), [slot], dtype, added, other)
    weights = [normal(N, K, dtype=dtype, seed=n) / K**0.5 for n, N in enumerate(counts)]
    total, normed, found = multiplied(shift, weights, other, other)
    wanted = multiplied_formula(shift, weights, other, other)
    assert torch.equal(total, wanted[0])
    close(normed, wanted[1])
    for y, one in zip(found, wanted[2]):
        close(y, one)


def test_nan_in_a_weight_of_a_product_stays_in_its_row():
    shift, weight = shift_of(1, 1024, 1, [2], torch.bfloat16), normal(80, 1024, dtype=torch.bfloat16)
    weight[3, 0] = weight[66, 1023] = weight[70, 512] = float("nan")
    (y,) = multiplied(shift, [weight])[2]
    assert y[0].isnan().nonzero().flatten().tolist() == [3, 66, 70]


def test_products_of_norms_that_are_refused():
    def taken(K, *counts):
        return products.takes([torch.empty(N, K, dtype=torch.bfloat16, device="meta") for N in counts])

    assert taken(2048, 7168, 2048)
    assert taken(2048, 2048, 2048, 2048, 2048)
    assert taken(2560, 8960, 2560)
    assert not taken(2048, 2048)  # K in parts is faster
    assert not taken(2000, 7168, 2048)
    assert not taken(8192, 7168, 2048)
    assert not products.takes([torch.empty(2048, 7168, dtype=torch.bfloat16).T])


@pytest.fixture
def begins(monkeypatch):
    """The functions that are called while all kernels take tensors on a CPU; those for Hopper are emulated, or formulas where they need
    larger models."""
    names = []

    def mixed_here(shift, mu, down, up):
        names.append("shifted_low_rank")
        total, normed, shifted = mixed(shift, mu, down, up)
        return total, shifted.unbind(), launch.Lasts(normed, shift.pool, shift.slots)

    def multiplied_here(shift, weights, *, complement, relu_squared):
        if shift.x.shape[0] > 1:
            return None
        names.append("shifted_products")
        total, normed, found = multiplied_formula(shift, weights, complement, relu_squared)
        dtype = shift.x.dtype
        return total, [one.to(dtype) for one in found], launch.Lasts(normed.to(dtype), shift.pool, shift.slots)

    for name in ("low_rank", "shifted_norm", "rwkv_step"):
        whole = getattr(launch, name)
        monkeypatch.setattr(launch, name, lambda *given, name=name, whole=whole, **more: names.append(name) or whole(*given, **more))
    monkeypatch.setattr(launch, "shifted_low_rank", mixed_here)
    monkeypatch.setattr(launch, "shifted_products", multiplied_here)
    monkeypatch.setattr(linear.native, "takes", lambda x, weight, many: False)
    for module in (convolution, decode, fused, linear):
        monkeypatch.setattr(module, "kernels", lambda name, *tensors: launch if name == "few_rows_launch" else None)
    return names


@pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("slots", [[2], [2, -1, 0]], ids=str)
@pytest.mark.parametrize("name", ["rwkv6", "rwkv5.0", "rwkv5.1", "rwkv5.2"])
def test_decode_steps_of_models(name, slots, hook, request):
    """Three steps are those of plain PyTorch, also where no later kernel replaces the rows of shift states."""
    model, results, slots = model_of(name, torch.float16), [], torch.tensor(slots)
    if hook:
        for layer in model.layers:
            layer.mixer.ln_x.register_forward_hook(lambda module, given, y: None)
            layer.channel.value.register_forward_hook(lambda module, given, y: None)
    ids = torch.randint(SIZES["vocab_size"], (len(slots), 3), generator=torch.Generator().manual_seed(2))
    live = (slots >= 0).nonzero()[:, 0]
    for kernels in (False, True):
        names, pool = request.getfixturevalue("begins") if kernels else [], model.initial_state(4)
        with linear.in_graph():
            logits = [model.advance(ids[:, t : t + 1], pool, slots=slots)[live] for t in range(3)]
        results.append([torch.cat(logits), *flat(pool)])
    for plain, found in zip(*results):
        assert error(found, plain) < 5e-3
    one, expected = len(slots) == 1, set() if hook or name == "rwkv5.0" else {"rwkv_step"}
    expected |= {"shifted_low_rank"} if name == "rwkv6" else set()
    expected |= {"shifted_products"} if one else set()
    expected |= {"shifted_norm"} if not one or name == "rwkv5.0" else set()
    assert set(names) == expected


def test_only_decode_steps_in_graphs_begin_so(begins):
    model = model_of("rwkv6", torch.float16)
    norm, mixer, channel = model.layers[0].mixer_norm, model.layers[0].mixer, model.layers[0].channel

    def found(tokens=1, slots=(0,), in_place=True, dtype=torch.float16, norm=norm, rows=3, mu=mixer.time_maa_x):
        C = SIZES["hidden_size"]
        x, pool = normal(len(slots or (0,)), tokens, C, dtype=dtype), normal(rows, C, dtype=dtype)
        sequences = Sequences(x, None, None if slots is None else torch.tensor(slots), in_place=in_place)
        weights = mu, mixer.time_maa_w1, mixer._factors(), mixer.time_maa_w2
        first = decode.shifted_low_rank(x, None, norm, pool, sequences, *weights)
        maps = [channel.key, channel.receptance]
        second = decode.shifted_linears(x, None, norm, pool, sequences, (mu, channel.time_maa_r), maps)
        assert (first is None) == (second is None)
        return first is not None

    with torch.no_grad():
        assert not found()
        with linear.rows_alike(), linear.in_graph():
            assert not found()
        with linear.in_graph():
            assert found()
            assert not found(tokens=2)
            assert not found(slots=None)
            assert not found(in_place=False)
            assert not found(dtype=torch.float32)
            assert not found(norm=torch.nn.Identity())
            assert not found(rows=0)
            assert not found(mu=mixer.time_maa_x * 1)
            channel.key.register_forward_hook(lambda module, given, y: None)
            assert decode.shifted_linears(*[None] * 5, (), [channel.key]) is None
    with linear.in_graph():
        assert decode._shift(*[None] * 5, (), ()) is None
    assert begins == ["shifted_low_rank", "shifted_products"]
