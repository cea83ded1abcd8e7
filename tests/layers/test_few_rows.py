"""The kernels of decode steps against PyTorch, under Triton's interpreter."""

from importlib import import_module

import pytest
import torch
from architectures import ARCHITECTURES, SIZES, flat, model_of
from formulas import error

from penstock.gpu.target import interpreting
from penstock.layers import fused, linear

launch = pytest.importorskip("penstock.layers.triton.few_rows_launch")
pytestmark = pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
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


@pytest.fixture
def launched(monkeypatch):
    """The functions that are called while the kernels of decode steps take tensors on a CPU."""
    names, whole = [], {name: getattr(launch, name) for name in ("products", "low_rank", "low_rank_decay", "shifted_norm")}

    def watched(name):
        return lambda *args, **options: names.append(name) or whole[name](*args, **options)

    for name in whole:
        monkeypatch.setattr(launch, name, watched(name))
    monkeypatch.setattr(linear.native, "takes", lambda x, weight, many: False)
    for module in (fused, linear):
        monkeypatch.setattr(module, "kernels", lambda name, *tensors: import_module(f"penstock.layers.triton.{name}"))
    return names


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not name.startswith("hybrid")])
def test_decode_steps_of_models(name, dtype, request):
    """Three steps with a skipped row are those of plain PyTorch."""
    model, results = model_of(name, dtype), []
    ids = torch.randint(SIZES["vocab_size"], (3, 3), generator=torch.Generator().manual_seed(2))
    for kernels in (False, True):
        names = request.getfixturevalue("launched") if kernels else []
        pool = model.initial_state(4)
        with linear.in_graph():
            logits = [model.advance(ids[:, t : t + 1], pool, slots=torch.tensor([2, -1, 0]))[::2] for t in range(3)]
        results.append([torch.cat(logits), *flat(pool)])
    for plain, found in zip(*results):
        assert not plain.numel() or error(found, plain) < (1e-5 if dtype == torch.float32 else 5e-3)
    expected = {"products"} if dtype == torch.float16 else set()
    if name.startswith("rwkv"):
        expected |= {"shifted_norm"}
    if name == "rwkv6":
        expected |= {"low_rank", "low_rank_decay"}
    assert set(names) == expected


def test_only_few_rows_of_16_bits_in_graphs_take_the_kernel(launched):
    weight = normal(24, 40, dtype=torch.float16)
    with torch.no_grad(), linear.in_graph():
        assert linear.linears([normal(2, 3, 40, dtype=torch.float16)], [weight])[0].shape == (2, 3, 24)
        assert linear.linears([normal(33, 40, dtype=torch.float16)], [weight]) is None
        assert linear.linears([normal(33, 40, dtype=torch.float16)] * 2, [weight] * 2)[1].shape == (33, 24)
        assert linear.linears([normal(0, 40, dtype=torch.float16)], [weight]) is None
        assert linear.linears([normal(3, 40)], [weight.float()]) is None
        assert linear.linears([normal(3, 40, dtype=torch.float16)], [weight.float()]) is None
        assert linear.linears([normal(3, 12, dtype=torch.float16)], [weight[:, ::3][:, :12]]) is None
    with linear.in_graph():
        assert linear.linears([normal(2, 3, 40, dtype=torch.float16)], [weight]) is None
    with torch.no_grad():
        assert linear.linears([normal(2, 3, 40, dtype=torch.float16)], [weight]) is None
    assert launched == ["products", "products"]
