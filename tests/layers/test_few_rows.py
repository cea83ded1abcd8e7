"""The kernels of decode steps against PyTorch, under Triton's interpreter."""

import pytest
import torch
from architectures import ARCHITECTURES, SIZES, flat, model_of
from formulas import error
from sampling import every

from penstock.gpu.target import interpreting
from penstock.layers import convolution, decode, linear, modes
from penstock.layers.sequences import Sequences
from penstock.recurrence import functional

launch = pytest.importorskip("penstock.layers.triton.few_rows_launch")
convolution_launch = pytest.importorskip("penstock.layers.triton.convolution_launch")
pytestmark = [pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter"), pytest.mark.sampled(file=True)]
DTYPES = [torch.float32, torch.float16]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def close(found, wanted, roundings=4):
    assert found.shape == wanted.shape
    assert (found.double() - wanted.double()).norm() <= roundings * torch.finfo(found.dtype).eps * wanted.double().norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 70), (9, 256), (20, 300), (67, 130)])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_products(parts, rows, size, dtype):
    inputs = [normal(rows, size, dtype=dtype, seed=part) for part in range(parts)]
    weights = [normal(count, size, dtype=dtype, seed=part) / 8 for part, count in enumerate((24, 40, 16, 33, 1)[:parts])]
    exact = [x.double() @ weight.double().T for x, weight in zip(inputs, weights)]
    wanted = [torch.relu(exact[0]).square(), *exact[1:]]
    by_columns = [weights[0].T.contiguous().T, *weights[1:]]
    for found in (launch.products(inputs, one, relu_squared=True) for one in (weights, by_columns)):
        for y, formula in zip(found, wanted):
            close(y, formula)
    gate = normal(rows, 24, dtype=dtype)
    (y,) = launch.products(inputs[:1], weights[:1], gate)
    close(y, exact[0] * gate.double().sigmoid())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "parts", "rank"), [(1, 5, 5), (20, 2, 32), (3, 1, 64)])
def test_low_rank_parts(rows, parts, rank, dtype):
    hidden, up = normal(rows, parts, rank, dtype=dtype), normal(parts, rank, 70, dtype=dtype) / 8
    mu = [normal(70, dtype=dtype, seed=part) for part in range(parts)]
    x, before = normal(rows, 70, dtype=dtype), normal(rows, 70, dtype=dtype, seed=1)
    factors = torch.stack(mu).double() + torch.einsum("rnm,nmc->rnc", hidden.double().tanh().to(dtype).double(), up.double())
    wanted = x.double()[:, None] + (before.double() - x.double())[:, None] * factors
    for found, formula in zip(launch.low_rank(hidden, up, mu, x, before), wanted.unbind(1)):
        close(found, formula)
    w = launch.low_rank_decay(hidden[:, 0].contiguous(), up[0], mu[0])
    assert w.dtype == torch.float32
    close(w, -torch.exp(factors[:, 0]), 20)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("slots", [None, (3, -1, 0)], ids=str)
def test_sums_norms_and_shifts(slots, added, centre, dtype):
    (x, y), count = (normal(3, 70, dtype=dtype, seed=n) for n in range(2)), 3 if slots is None else 5
    weight, bias, *mu = (normal(70, dtype=dtype, seed=n) for n in range(4))
    pool = normal(count, 2, 70, dtype=dtype)[:, 1]  # gaps between rows
    kept, version = pool.clone(), pool._version
    rows = None if slots is None else torch.tensor(slots)
    found = launch.shifted_norm(
        x, y if added else None, weight, bias if centre else None, 1e-3, pool, rows, mu, centre=centre, complement=added, kept=True
    )
    total = x + y if added else x
    assert torch.equal(found.total, total)
    sums = total.double() - centre * total.double().mean(-1, keepdim=True)
    normed = sums / (sums.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double() + centre * bias.double()
    close(found.normed, normed)
    for n, slot in enumerate((0, 1, 2) if slots is None else slots):
        if slot < 0:
            continue
        assert torch.equal(found.before[n], kept[slot])
        assert torch.equal(pool[slot], found.normed[n])
        now, step = found.normed[n].double(), (kept[slot].double() - found.normed[n].double())
        for one, factor in zip(found.mixed, mu):
            close(one[n], now + step * (1 - factor.double() if added else factor.double()))
        kept[slot] = pool[slot]
    assert torch.equal(pool, kept)
    assert pool._version > version


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("lengths", [(3, 0, 1, 4, 0), (0, 1, 1), (7,)], ids=str)
@pytest.mark.parametrize("slots", [None, (3, 0, -1, 4, 1)], ids=str)
def test_sums_norms_and_shifts_of_sequences(slots, lengths, added, dtype):
    """They are those of decode steps, one token after another, to the bit. Empty sequences change no row."""
    R, N = sum(lengths), len(lengths)
    (x, y), pool = (normal(R, 70, dtype=dtype, seed=n) for n in range(2)), normal(6, 2, 70, dtype=dtype)[:, 1]
    weight, bias, *mu = (normal(70, dtype=dtype, seed=n) for n in range(5))
    rows, kept = None if slots is None else torch.tensor(slots[:N]), pool.clone()
    ends = torch.tensor([0, *lengths]).cumsum(0)
    starts = torch.full((R,), -1, dtype=torch.int32)
    for n in range(N):
        if lengths[n]:
            starts[ends[n]] = n
    given = {"centre": added, "complement": added, "kept": True}
    found = launch.shifted_norm(x, y if added else None, weight, bias if added else None, 1e-3, pool, rows, mu, (starts, ends), **given)
    for n in range(N):
        slot = n if rows is None else int(rows[n])
        own = kept[slot : slot + 1].clone() if slot >= 0 else kept[:1] * 0
        for r in range(int(ends[n]), int(ends[n + 1])):
            at = slice(r, r + 1)
            wanted = launch.shifted_norm(x[at], y[at] if added else None, weight, bias if added else None, 1e-3, own, None, mu, **given)
            for one, other in zip((*found[:3], *found.mixed), (*wanted[:3], *wanted.mixed)):
                assert torch.equal(one[at], other)
        if slot >= 0:
            kept[slot] = own[0]
    assert torch.equal(pool, kept)


def step_inputs(rows, heads, K, V, rank, dtype=torch.float32, state=torch.float32, room=9):
    """Arguments of a step of an RWKV; the pool has gaps between rows, heads and keys."""
    r, k, v, gate = (normal(rows, heads, size, dtype=dtype, seed=n) for n, size in enumerate((K, K, V, V)))
    u, bias = normal(K, heads, dtype=dtype, seed=4).T, normal(heads, 2, K, dtype=dtype, seed=5)[:, 1]
    low, up = (normal(rows, rank, dtype=dtype), normal(rank, heads * K, dtype=dtype) / rank**0.5) if rank else (None, None)
    pool = normal(room, heads + 1, K + 2, V, dtype=state)[:, :heads, :K]
    weight, shift = normal(heads * V, dtype=dtype, seed=6), normal(heads * V, dtype=dtype, seed=7)
    return [r, k, v, gate, u, bias, low, up, pool, weight, shift]


def step_formula(r, k, v, gate, u, bias, low, up, states, weight, shift, eps):
    """In float64: the output and the new states."""
    given = [None if x is None else x.double() for x in (r, k, v, gate, u, bias, low, up, states, weight, shift)]
    r, k, v, gate, u, bias, low, up, states, weight, shift = given
    R, H, V = v.shape
    factor = 0 if low is None else (low.tanh() @ up).view(r.shape)
    new = k[..., None] * v[..., None, :]
    o = torch.einsum("rhk,rhkv->rhv", r, states + u[..., None] * new)
    normed = torch.group_norm(o.reshape(R, H * V), H, weight, shift, eps).view(v.shape)
    return normed * torch.nn.functional.silu(gate), states * torch.exp(-torch.exp(bias + factor))[..., None] + new


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [None, (3, -1, 0)], ids=str)
@pytest.mark.parametrize(("heads", "K", "V", "rank"), [(2, 64, 64, 64), (3, 10, 24, 5), (1, 33, 7, 0), (2, 8, 40, 100)])
def test_steps_of_rwkv(heads, K, V, rank, slots, state, dtype):
    *given, pool, weight, shift = step_inputs(3, heads, K, V, rank, dtype, state)
    kept, version = pool.clone(), pool._version
    rows = None if slots is None else torch.tensor(slots)
    y = launch.rwkv_step(*given, pool, rows, weight, shift, 1e-3)
    live = [n for n in range(3) if slots is None or slots[n] >= 0]
    places = live if slots is None else [slots[n] for n in live]
    own = [x if n in (4, 5, 7) or x is None else x[live] for n, x in enumerate(given)]  # u, bias and up are of all rows
    wanted, states = step_formula(*own, kept[places], weight, shift, 1e-3)
    close(y[live], wanted)
    close(pool[places], states)
    others = [n for n in range(9) if n not in places]
    assert torch.equal(pool[others], kept[others])
    assert len(live) == 3 or y[1].abs().max() == 0
    assert pool._version > version


def test_bits_of_a_row_do_not_depend_on_other_rows_of_a_step():
    *given, pool, weight, shift = step_inputs(5, 2, 24, 40, 6)
    slots, kept = torch.tensor([4, 2, -1, 0, 8]), pool.clone()
    y = launch.rwkv_step(*given, pool, slots, weight, shift, 1e-3)
    for n in (0, 3, 4):
        alone, one = kept.clone(), [x if m in (4, 5, 7) else x[n : n + 1] for m, x in enumerate(given)]
        assert torch.equal(launch.rwkv_step(*one, alone, slots[n : n + 1], weight, shift, 1e-3)[0], y[n])
        assert torch.equal(alone[slots[n]], pool[slots[n]])


@pytest.mark.parametrize("place", [0, 1, 2, 3, 6, 8])
def test_nan_in_one_row_of_a_step_stays_there(place):
    *given, pool, weight, shift = step_inputs(3, 2, 10, 12, 6)
    slots, kept = torch.tensor([4, 2, 0]), pool.clone()
    wanted = launch.rwkv_step(*given, kept, slots, weight, shift, 1e-3)
    *given, pool, weight, shift = step_inputs(3, 2, 10, 12, 6)
    if place == 8:
        pool[2, 1, 3, 5] = float("nan")
    else:
        given[place][1, ..., 0] = float("nan")
    found = launch.rwkv_step(*given, pool, slots, weight, shift, 1e-3)
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])
    assert torch.equal(pool[[4, 0]], kept[[4, 0]])
    assert found[1].isnan().any() == (place != 6)  # the output precedes the decay
    assert pool[2].isnan().any() == (place not in (0, 3))


def test_steps_take_pools_of_any_strides():
    *given, pool, weight, shift = step_inputs(3, 2, 10, 12, 6)
    results = []
    for one in (pool.contiguous(), pool.mT.contiguous().mT, pool.transpose(0, 3).contiguous().transpose(0, 3)):
        y = launch.rwkv_step(*given, one, torch.tensor([4, 2, 0]), weight, shift, 1e-3)
        results.append((y, one))
    for y, one in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(one, results[0][1])


@pytest.mark.parametrize("slot", [4, 0, -1])
@pytest.mark.parametrize("C", [20, 48, 70])
def test_steps_replace_a_row_of_a_shift_state(C, slot):
    """The result of the step does not change; a negative slot changes no row."""
    normed, pool, slots = normal(1, C), normal(9, 2, C, dtype=torch.float16)[:, 1], torch.tensor([slot])
    kept, version, results = pool.clone(), pool._version, []
    for lasts in (None, launch.Lasts(normed, pool, slots)):
        *given, states, weight, shift = step_inputs(1, 3, 10, 12, 6)
        results.append(launch.rwkv_step(*given, states, slots, weight, shift, 1e-3, lasts=lasts))
    assert torch.equal(*results)
    if slot >= 0:
        kept[slot] = normed[0].half()
    assert torch.equal(pool, kept)
    assert pool._version > version


def test_steps_have_the_states_of_updates_in_place():
    """To the bit, for the same decays."""
    *given, pool, weight, shift = step_inputs(3, 2, 16, 20, 0)
    r, k, v, _, u, bias, *_ = given
    kept, slots = pool.clone(), torch.tensor([2, -1, 5])
    launch.rwkv_step(*given, pool, slots, weight, shift, 1e-3)
    w = launch.low_rank_decay(torch.zeros(3, 4), torch.zeros(4, 32), bias.reshape(-1)).view(3, 1, 2, 16)
    q, k, v = (x[:, None] for x in (r, k, v))
    functional.advance("rwkv6", q, k, v, w, u, state=kept, slots=slots, impl="triton_recurrent")
    assert torch.equal(pool, kept)


@pytest.mark.parametrize("log", [-0.4, -2.0, -9.0, -24.0])
def test_what_a_strong_decay_leaves_is_exact(log):
    *given, pool, weight, shift = step_inputs(1, 2, 16, 20, 0)
    given[2].zero_()  # v
    given[5].fill_(-log).log_()  # the decay is -exp(bias)
    kept = pool[:1].double()
    launch.rwkv_step(*given, pool, torch.tensor([0]), weight, shift, 1e-3)
    wanted = kept * (-given[5].double().exp()).exp()[..., None]
    assert ((pool[:1].double() - wanted).abs() <= 2e-6 * wanted.abs()).all()


@pytest.fixture
def launched(ran, no_native_kernels):
    """The function ``ran``, with the forms of decode steps alone, while no chain takes a native kernel."""
    names = {"products", "low_rank", "low_rank_decay", "shifted_norm", "rwkv_step", "convolution_in_place"}
    names |= {"low_rank_products", "rwkv7_step"}
    return lambda: {name: count for name, count in ran().items() if name in names}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not name.startswith("hybrid")])
def test_decode_steps_of_models(name, dtype, request):
    """Three steps with a skipped row, several tokens and packed rows are those of plain PyTorch. In float16 the last layer is halved."""
    model, results = model_of(name, dtype, rescale_every=1), []
    ids = torch.randint(SIZES["vocab_size"], (3, 5), generator=torch.Generator().manual_seed(2))
    ends = torch.tensor([0, 3, 4, 4, 9])
    for kernels in (False, True):
        names = request.getfixturevalue("launched") if kernels else dict
        pool = model.initial_state(4)
        with modes.in_graph():
            logits = [model.advance(ids[:, t : t + 1], pool, slots=torch.tensor([2, -1, 0]))[::2] for t in range(3)]
            logits.append(model.advance(ids[:, 3:], pool, slots=torch.tensor([2, -1, 0]))[::2].flatten(0, 1)[:, None])
            packed = model.advance(ids[:2, :].reshape(1, -1)[:, :9], pool, cu_seqlens=ends, slots=torch.tensor([1, -1, 2, 0]))
            logits.append(torch.cat([packed[0, :3], packed[0, 4:]])[:, None])
        results.append([torch.cat(logits), *flat(pool)])
    for plain, found in zip(*results):
        assert not plain.numel() or error(found, plain) < (1e-5 if dtype == torch.float32 else 5e-3)
    expected = {"products"} if dtype == torch.float16 else set()
    if name.startswith("rwkv"):
        expected |= {"shifted_norm"}
    if name in ("rwkv5.1", "rwkv5.2", "rwkv6"):
        expected |= {"rwkv_step"}
    if name == "rwkv6":
        expected |= {"low_rank", "low_rank_decay"}
    if name in ("rwkv7", "rwkv7a", "rwkv7b"):
        expected |= {"rwkv7_step"} | ({"low_rank_products"} if dtype == torch.float16 else set())
    if any(isinstance(one, convolution.ShortConvolution) for one in model.modules()):
        expected |= {"convolution_in_place"}
    assert names().keys() == expected


class Doubled(torch.nn.Module):
    """Another norm."""

    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("change", every(2, ["hook", "module", "forward", "no weight"]))
@pytest.mark.parametrize("name", ["gla", "rwkv6"])
def test_norms_that_are_changed_run(name, change, request):
    """Their kernels, which read the weights only, do not replace them."""
    model, results = model_of(name, torch.float32), []
    for layer in model.layers:
        norm, C = layer.mixer_norm, SIZES["hidden_size"]
        if change == "hook":
            norm.register_forward_hook(lambda module, given, y: 2 * y)
        elif change == "forward":
            norm.forward = lambda x, forward=norm.forward: 2 * forward(x)
        else:
            layer.mixer_norm = Doubled() if change == "module" else torch.nn.LayerNorm(C, elementwise_affine=False)
    ids = torch.randint(SIZES["vocab_size"], (3, 2), generator=torch.Generator().manual_seed(2))
    wanted = model(ids).logits
    for kernels in (False, True):
        if kernels:
            request.getfixturevalue("launched")
        pool = model.initial_state(3)
        with modes.in_graph():
            results.append(torch.stack([model.advance(ids[:, t : t + 1], pool)[:, 0] for t in range(2)], 1))
    for found in results:
        assert error(found, wanted) < 1e-5


def test_only_few_rows_of_16_bits_in_graphs_take_the_kernel(launched):
    weight = normal(24, 40, dtype=torch.float16)
    with torch.no_grad(), modes.in_graph():
        assert linear.linears([normal(2, 3, 40, dtype=torch.float16)], [weight])[0].shape == (2, 3, 24)
        assert linear.linears([normal(33, 40, dtype=torch.float16)], [weight]) is None
        assert linear.linears([normal(33, 40, dtype=torch.float16)] * 2, [weight] * 2)[1].shape == (33, 24)
        assert linear.linears([normal(0, 40, dtype=torch.float16)], [weight]) is None
        assert linear.linears([normal(3, 40)], [weight.float()]) is None
        assert linear.linears([normal(3, 40, dtype=torch.float16)], [weight.float()]) is None
        assert linear.linears([normal(3, 12, dtype=torch.float16)], [weight[:, ::3][:, :12]]) is None
        assert linear.linears([normal(3, 40, dtype=torch.float16)], [weight[:0]]) is None
        assert linear.linears([normal(3, 48, dtype=torch.float16)], [weight]) is None
    with modes.in_graph():
        assert linear.linears([normal(2, 3, 40, dtype=torch.float16)], [weight]) is None
    with torch.no_grad():
        assert linear.linears([normal(2, 3, 40, dtype=torch.float16)], [weight]) is None
    assert launched() == {"products": 2}


@pytest.mark.parametrize("size", [32, 48])
@pytest.mark.parametrize("mode", [modes.rows_alike, modes.in_graph])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_of_another_size_than_the_weight_are_refused(dtype, mode, size, launched):
    """A kernel would read behind the rows of the weight, or a part of them."""
    with torch.no_grad(), mode(), pytest.raises(RuntimeError, match="shapes"):
        linear.linear(normal(3, size, dtype=dtype), normal(24, 40, dtype=dtype))


def test_only_decode_steps_in_graphs_take_the_kernel_of_a_step(launched):
    norm, learned = torch.nn.GroupNorm(2, 8), torch.nn.Parameter(normal(2, 6))

    def found(pool, dtype=torch.float32, up=None, tokens=1, in_place=True, u=learned, bias=learned):
        sequences = Sequences(torch.empty(3, tokens, 1), in_place=in_place)
        low_rank = None if up is None else (normal(3, 1, up.shape[0]), up)
        x, gate = normal(3, 1, 12, dtype=dtype), normal(3, 1, 2 * pool.shape[3])
        return decode.rwkv_step(x, x, gate, gate, u, bias, norm, pool, sequences, low_rank)

    with torch.no_grad():
        assert found(normal(3, 2, 6, 4)) is None
        with modes.in_graph():
            assert found(normal(3, 2, 6, 4)).shape == (3, 1, 8)
            assert found(normal(3, 2, 6, 4), tokens=2) is None
            assert found(normal(3, 2, 6, 4), in_place=False) is None
            assert found(normal(3, 2, 6, 4), up=torch.nn.Parameter(normal(12, 5).T)) is None
            for result_of_a_kernel in ({"u": 1 * learned}, {"bias": 1 * learned}, {"up": normal(5, 12)}):
                assert found(normal(3, 2, 6, 4), **result_of_a_kernel) is None
            assert found(normal(3, 2, 6, 4), dtype=torch.float16) is None
            assert found(normal(0, 2, 6, 4)) is None
            assert found(normal(3, 2, 6, 600)) is None
    with modes.in_graph():
        assert found(normal(3, 2, 6, 4)) is None
    assert launched() == {"rwkv_step": 1}


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not name.startswith("hybrid")])
def test_parameters_of_any_strides(name, request):
    """As views of a larger tensor are: a kernel that reads them as contiguous reads the NaN between their elements."""
    model, results = model_of(name, torch.float32), []
    ids = torch.randint(SIZES["vocab_size"], (3, 3), generator=torch.Generator().manual_seed(2))
    for kernels in (False, True):
        if kernels:
            request.getfixturevalue("launched")
            for one in model.parameters():
                one.data = torch.stack([one.data, torch.full_like(one.data, torch.nan)], -1)[..., 0]
        pool = model.initial_state(4)
        with modes.in_graph():
            logits = [model.advance(ids[:, t : t + 1], pool, slots=torch.tensor([2, -1, 0]))[::2] for t in range(3)]
        results.append([torch.cat(logits), *flat(pool)])
    for plain, found in zip(*results):
        assert not plain.numel() or error(found, plain) < 1e-5


@pytest.mark.parametrize("change", ["none", "outside of graphs", "strides", "computed"])
@pytest.mark.parametrize("name", ["rwkv5.0", "rwkv6"])
def test_weights_are_read_early_only_where_no_kernel_just_before_writes_them(name, change, launched, monkeypatch):
    """Only parameters in a graph: not copies, not those of a parametrization, which is computed in each step."""
    model, early = model_of(name, torch.float32), []
    for one in ("low_rank", "low_rank_decay", "shifted_norm"):
        whole = getattr(launch, one)
        monkeypatch.setattr(launch, one, lambda *given, whole=whole, **options: early.append(options["early"]) or whole(*given, **options))
    if name == "rwkv6":
        monkeypatch.setattr("penstock.layers.rwkv6.rwkv_step", lambda *given: None)
    for one in model.parameters() if change == "strides" else ():
        one.data = torch.stack([one.data] * 2, -1)[..., 0]
    for module in list(model.modules()) if change == "computed" else ():
        for factor in [one for one, _ in module.named_parameters(recurse=False) if one.startswith("time_")]:
            torch.nn.utils.parametrize.register_parametrization(module, factor, Doubled())
    with modes.in_graph() if change != "outside of graphs" else torch.no_grad():
        model.advance(torch.zeros(3, 1, dtype=torch.int64), model.initial_state(3))
    assert early == [change == "none"] * (len(model.layers) * (4 if name == "rwkv6" else 2))
