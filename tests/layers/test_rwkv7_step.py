"""Kernels of decode steps of RWKV-7: native, and under Triton's interpreter."""

import pytest
import torch
from formulas import error

from penstock.gpu.target import interpreting
from penstock.layers.cpu import absent
from penstock.layers.cpu import rwkv7 as native
from penstock.layers.rwkv7_chains import inputs_formula
from penstock.layers.triton import launching

pytestmark = pytest.mark.sampled(file=True)
needs_interpreter = pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
EPS = 1e-3


def normal(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def step_inputs(rows, heads, size, mixed=True, dtype=torch.float32, state=torch.float32):
    """The tensors of tokens, the parameters, those of the norm, and a pool with gaps between rows, heads and keys."""
    tokens = [normal(rows, heads, size, seed=n, dtype=dtype) for n in range(9)]  # r, k, w, rate, v, mix, first, gate, values
    learned = [normal(heads, size, seed=n, dtype=dtype) for n in range(9, 15)]  # k_k, k_a, r_k, w0, a0, v0
    norm = [normal(heads * size, seed=n, dtype=dtype) for n in (15, 16)]
    pool = normal(9, heads + 1, size + 2, size, seed=17, dtype=state)[:, :heads, :size]
    return tokens if mixed else [*tokens[:4], None, None, None, *tokens[7:]], learned if mixed else [*learned[:5], None], norm, pool


def given_of(tokens, learned):
    r, k, w, rate, v, mix, first, *_ = tokens
    return [r, k, w, rate, *learned[:5], v, mix, first, learned[5]]


def by_triton(tokens, learned, norm, pool, slots=None):
    launch = launching("rwkv7_step_launch")
    return launch.rwkv7_step(launch.Given(*given_of(tokens, learned)), *tokens[7:], *norm, EPS, pool, slots)


def by_native(tokens, learned, norm, pool, slots=None):
    *first, v, mix, before, gate, values = tokens
    return native.rwkv7_step((*first, values if v is None else v, mix, before, gate), (*learned, *norm), EPS, pool, slots)


@pytest.fixture(params=[pytest.param(by_triton, id="triton", marks=needs_interpreter), pytest.param(by_native, id="native")])
def stepped(request):
    """A decode step by one of the kernels."""
    if request.param is by_native and absent("rwkv7_step", torch.device("cpu")) is not None:
        pytest.skip("needs the native library")
    return request.param


def formula(tokens, learned, norm, states):
    """In float64, literally: the output and the new states."""
    wide = [None if x is None else x.double() for x in given_of(tokens, learned)]
    r, raw, key, a, b, share, *mixed = inputs_formula(*wide)
    gate, values = (x.double() for x in tokens[7:])
    v = mixed[0] if mixed else values
    decay = torch.exp(-(torch.tensor(-0.5, dtype=torch.float64).exp()) * raw.sigmoid())
    removed = torch.einsum("rhk,rhkv->rhv", a, states.double())
    states = decay[..., None] * states.double() + torch.einsum("rhk,rhv->rhkv", b, removed) + torch.einsum("rhk,rhv->rhkv", key, v)
    o = torch.einsum("rhk,rhkv->rhv", r, states)
    normed = torch.group_norm(o.flatten(1), o.shape[1], *(x.double() for x in norm), EPS).view(o.shape)
    return (normed + share[..., None] * v) * gate, states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("state", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("slots", [None, (3, -1, 0)], ids=str)
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize(("heads", "size"), [(2, 64), (3, 10), (1, 128)])
def test_steps(heads, size, mixed, slots, state, dtype, stepped):
    """A negative slot gives 0 and changes no row."""
    tokens, learned, norm, pool = step_inputs(3, heads, size, mixed, dtype, state)
    kept, version, rows = pool.clone(), pool._version, None if slots is None else torch.tensor(slots)
    y = stepped(tokens, learned, norm, pool, rows)
    live = [n for n in range(3) if slots is None or slots[n] >= 0]
    places = live if slots is None else [slots[n] for n in live]
    wanted, states = formula([None if x is None else x[live] for x in tokens], learned, norm, kept[places])
    tolerance = 4 * max(torch.finfo(one).eps for one in (dtype, torch.float32))
    assert error(y[live], wanted) < tolerance
    assert error(pool[places], states) < 4 * torch.finfo(state).eps
    others = [n for n in range(9) if n not in places]
    assert torch.equal(pool[others], kept[others])
    assert len(live) == 3 or y[1].abs().max() == 0
    assert pool._version > version


def test_bits_of_a_row_do_not_depend_on_other_rows_or_warps(stepped):
    tokens, learned, norm, pool = step_inputs(5, 2, 24)
    slots, kept = torch.tensor([4, 2, -1, 0, 8]), pool.clone()
    y = stepped(tokens, learned, norm, pool, slots)
    for n in (0, 3, 4):
        alone = kept.clone()
        assert torch.equal(stepped([x[n : n + 1] for x in tokens], learned, norm, alone, slots[n : n + 1])[0], y[n])
        assert torch.equal(alone[slots[n]], pool[slots[n]])


@pytest.mark.parametrize("place", range(9))
def test_nan_in_one_row_stays_there(place, stepped):
    slots, results = torch.tensor([4, 2, 0]), []
    for spoiled in (False, True):
        tokens, learned, norm, pool = step_inputs(3, 2, 10)
        if spoiled:
            (pool[2] if place == 8 else tokens[place][1])[..., 0] = float("nan")
        results.append((stepped(tokens, learned, norm, pool, slots), pool))
    (y, pool), (found, states) = results
    assert torch.equal(found[[0, 2]], y[[0, 2]])
    assert torch.equal(states[[4, 0]], pool[[4, 0]])
    assert found[1].isnan().any()


def test_steps_take_pools_of_any_strides(stepped):
    tokens, learned, norm, pool = step_inputs(3, 2, 10)
    results = []
    for one in (pool.contiguous(), pool.mT.contiguous().mT, pool.transpose(0, 3).contiguous().transpose(0, 3)):
        results.append((stepped(tokens, learned, norm, one, torch.tensor([4, 2, 0])), one))
    for y, one in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(one, results[0][1])


def test_keys_of_zero_remove_nothing(stepped):
    tokens, learned, norm, pool = step_inputs(2, 2, 10)
    tokens[1].zero_()
    kept = pool.clone()
    y = stepped(tokens, learned, norm, pool, torch.tensor([1, 2]))
    wanted, states = formula(tokens, learned, norm, kept[[1, 2]])
    assert error(y, wanted) < 1e-6
    assert error(pool[[1, 2]], states) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "C", "ranks"), [(1, 64, (8, 16, 24, 40)), (3, 70, (5,)), (70, 300, (32, 96, 64)), (20, 40, (8, 280))])
@needs_interpreter
def test_low_rank_maps(rows, C, ranks, dtype):
    launch, kinds = launching("rwkv7_step_launch"), ["tanh", None, "sigmoid", None][: len(ranks)]
    x = [normal(rows, C, seed=n, dtype=dtype) for n in range(len(ranks))]
    downs = [normal(C, M, seed=M, dtype=dtype) / C**0.5 for M in ranks]
    ups = [normal(M, C + 2, seed=M, dtype=dtype) / M**0.5 for M in ranks]
    functions = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, None: lambda x: x}
    for one, down, up, kind, y in zip(x, downs, ups, kinds, launch.low_rank_maps(x, downs, ups, kinds)):
        wanted = functions[kind](one.double() @ down.double()) @ up.double()
        assert error(y, wanted) < 4 * torch.finfo(dtype).eps
    hidden = [one @ down for one, down in zip(x, downs)]
    whole, few = (launch.low_rank_ups([one[:n] for one in hidden], ups, kinds, alike=True) for n in (rows, 1))
    for one, up, kind, y, first in zip(hidden, ups, kinds, whole, few):
        assert error(y, functions[kind](one.double()) @ up.double()) < 4 * torch.finfo(dtype).eps
        assert torch.equal(first[0], y[0])
