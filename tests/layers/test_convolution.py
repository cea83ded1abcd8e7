"""The kernels of short convolutions against a loop over tokens in float64, under Triton's interpreter."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from convolutions import BATCH, PACKED, Case, cases, check, loop, normal
from sampling import every, slow

from penstock.gpu.target import interpreting
from penstock.layers import GLAConfig
from penstock.layers import convolution as module
from penstock.layers.convolution import ShortConvolution, convolution_formula
from penstock.layers.sequences import Sequences

launch = pytest.importorskip("penstock.layers.triton.launch")
kernels = pytest.importorskip("penstock.layers.triton.convolution_launch")
pytestmark = [pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter"), pytest.mark.sampled(file=True)]
FLOAT32, FLOAT16, FLOAT64 = torch.float32, torch.float16, torch.float64


@pytest.fixture
def on_a_cpu(monkeypatch, kernels_on_a_cpu):
    """Kernels take tensors on a CPU; the names of the functions that launch them."""
    names = []
    for name in ("convolved", "tails", "step"):
        whole = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *given, whole=whole, name=name, **options: names.append(name) or whole(*given, **options))
    return names


def sequences_of(case):
    if case.bounds == BATCH:
        return Sequences(torch.empty(3, 25, 1))
    return Sequences(torch.empty(1, 75, 1), torch.tensor(case.bounds))


def formula_of(case):
    return partial(convolution_formula, sequences=sequences_of(case), silu=case.silu)


def convolution_of(W, C=70, dtype=FLOAT32, bias=True, activation="silu"):
    one = ShortConvolution(C, W, bias, activation)
    for n, parameter in enumerate(one.parameters()):
        parameter.data = normal(*parameter.shape, seed=n)
    return one.to(dtype)


@pytest.mark.parametrize("case", cases(FLOAT32, FLOAT16), ids=str)
def test_results_and_gradients(case, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", 8)  # several groups of tokens a program
    check(case, kernels.Convolution, formula_of(case))


@pytest.mark.parametrize("case", cases(FLOAT64), ids=str)
def test_plain_torch(case):
    check(
        case,
        type("Plain", (), {"apply": lambda x, tail, starts, bounds, weight, bias, silu, formula: formula(x, tail, weight, bias)}),
        formula_of(case),
    )


@pytest.mark.parametrize("C", every(3, [1, 127, 128, 129, 300]))
def test_channels(C):
    case = Case(4, PACKED, True, True, FLOAT32, C)
    check(case, kernels.Convolution, formula_of(case))


@pytest.mark.parametrize("bounds", [PACKED, BATCH], ids=str)
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_gradients_of_tails(used, learned, bounds):
    """By way of y, of the new tail and of both; ``learned``: also of the inputs before the first token."""
    case = Case(4, bounds, True, True, FLOAT32)
    given = [one.requires_grad_(learned or n != 1) for n, one in enumerate(case.draw())]
    exact = [one.detach().double().requires_grad_(one.requires_grad) for one in given]
    formula = formula_of(case) if 1 in used else None  # kernels have no gradient of the new tail
    results = kernels.Convolution.apply(*given[:2], *case.offsets(), *given[2:], True, formula), loop(*exact, bounds, True)
    grads = []
    for found, leaves in zip(results, (given, exact)):
        inputs = [one for one in leaves if one.requires_grad]
        loss = sum(found[n].sin().sum() for n in used)
        grads.append(torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True))
    for one, other in zip(*grads):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("learned", [(2, 3), *slow((2,), (3,))], ids=str)
def test_tails_of_inputs_without_gradients_have_none(learned):
    """A frozen projection before the convolution: what a later call computes from the tail gives no gradient, and no error."""
    case = Case(4, PACKED, True, True, FLOAT32)
    given = [one.requires_grad_(n in learned) for n, one in enumerate(case.draw())]
    leaves = [given[n] for n in learned]
    y, after = kernels.Convolution.apply(*given[:2], *case.offsets(), *given[2:], True, formula_of(case))
    assert y.requires_grad
    assert not after.requires_grad
    grads = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (y.sin().sum(), y.sin().sum() + after.sin().sum())]
    assert all(torch.equal(one, other) for one, other in zip(*grads))


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("bounds", [PACKED, BATCH], ids=str)
def test_second_derivatives(bounds, silu):
    case = Case(3, bounds, True, silu, FLOAT32)
    x, tail, weight, bias = case.draw()
    x, weight, bias = (one.requires_grad_() for one in (x, weight, bias))
    exact = [one.detach().double().requires_grad_(n != 1) for n, one in enumerate((x, tail, weight, bias))]
    found = []
    results = kernels.Convolution.apply(x, tail, *case.offsets(), weight, bias, silu, formula_of(case)), loop(*exact, bounds, silu)
    for (y, _), leaves in zip(results, ((x, weight, bias), (exact[0], *exact[2:]))):
        first = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(one.square().sum() for one in first), leaves)])
    for one, other in zip(*found):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("W", [1, 2, 4, 8])
def test_bits_do_not_depend_on_cuts_packing_or_programs(W, on_a_cpu, monkeypatch):
    one, x = convolution_of(W), normal(3, 11, 90).float()[..., 20:]
    zero = normal(3, W - 1, 70).float()
    with torch.no_grad():
        whole, end = one(x, zero, Sequences(x))
        for cut in range(12):
            first, tail = one(x[:, :cut], zero, Sequences(x[:, :cut]))
            second, tail = one(x[:, cut:], tail, Sequences(x[:, cut:]))
            assert torch.equal(torch.cat([first, second], 1), whole)
            assert torch.equal(tail, end)
        for programs in (1, 100):
            monkeypatch.setattr(launch, "PROGRAMS", programs)
            flat = x.reshape(1, -1, 70)
            packed, tail = one(flat, zero, Sequences(flat, torch.arange(4) * 11))
            assert torch.equal(packed.view(whole.shape), whole)
            assert torch.equal(tail, end)
        pool = zero.clone()
        steps = [one(x[:, t : t + 1], pool, Sequences(x[:, :1], in_place=True))[0] for t in range(11)]
        assert torch.equal(torch.cat(steps, 1), whole)
        assert torch.equal(pool, end)
    assert set(on_a_cpu) == {"convolved", "tails", "step"}


def test_gradients_do_not_depend_on_other_sequences_or_programs(monkeypatch):
    """Those of x, to the bit."""
    case, found = Case(4, BATCH, True, True, FLOAT32), []
    x, tail, weight, bias = case.draw()
    starts, bounds = case.offsets()
    for end, programs in ((75, 1), (75, 100), (25, 1)):
        monkeypatch.setattr(launch, "PROGRAMS", programs)
        leaf = x[:end].clone().requires_grad_()
        y, _ = kernels.Convolution.apply(leaf, tail, starts[:end], bounds, weight, bias, True, None)
        found.append(torch.autograd.grad(y, leaf, normal(75, 70, seed=4).float()[:end])[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0][:25], found[2])


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
@pytest.mark.parametrize("slots", [None, (4, -1, 5, 0), (-1, -1, -1, -2)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (5, 5, 5, 5), (2, 2, 2, 2), (3, 0, 7, 1), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("W", [1, 4])
def test_rows_of_a_pool_are_updated_in_place(W, lengths, slots, dtype, on_a_cpu):
    """Columns of the rows of a pool with gaps. Other rows and columns, and rows of negative slots, stay as they are."""
    one, rows = convolution_of(W, dtype=dtype), range(4) if slots is None else slots
    memory = normal(4 if slots is None else 6, 2, W - 1, 100, seed=7).to(dtype)
    pool, kept = memory[:, 0, :, 10:80], memory.clone()
    even = len(set(lengths)) == 1
    x = normal(4, lengths[0], 90).to(dtype)[..., 20:] if even else normal(1, sum(lengths), 90).to(dtype)[..., 20:]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    given = {"slots": None if slots is None else torch.tensor(slots, dtype=torch.int32), "in_place": True}
    version = memory._version
    with torch.no_grad():
        y, after = one(x, pool, Sequences(x, None if even else ends.int(), **given))
    assert after is pool
    assert memory._version > version or not x.numel() or W == 1
    assert on_a_cpu == (["step"] if lengths[0] == 1 else ["convolved", "tails"])
    assert y.shape == x.shape
    for n, row in enumerate(rows):
        if row < 0:
            continue
        begin, end = ends[n : n + 2].tolist()
        tail, weight = kept[row : row + 1, 0, :, 10:80].double(), one.weight.squeeze(1).double()
        if begin < end:
            true, tail = loop(x.reshape(-1, 70)[begin:end].double(), tail, weight, one.bias.double(), (0, end - begin), True)
            assert (y.reshape(-1, 70)[begin:end] - true).norm() <= torch.finfo(dtype).eps * true.norm()
        kept[row, 0, :, 10:80] = tail[0].to(dtype)
    assert torch.equal(memory, kept)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("change", ["dtype", "stride", "empty"])
def test_pools_that_the_kernel_cannot_update(change, packed, on_a_cpu):
    """Rows are read, and the new states returned."""
    one, x = convolution_of(4), normal(1, 6, 70).float() if packed else normal(2, 3, 70).float()
    pool = normal(5, 3, 70).float()
    pool = {"dtype": pool.half(), "stride": pool.mT.contiguous().mT, "empty": pool[:0]}[change]
    kept, slots = pool.clone(), torch.tensor([-1, -1] if change == "empty" else [3, 0])
    sequences = Sequences(x, torch.tensor([0, 2, 6]) if packed else None, slots, in_place=True)
    with torch.no_grad():
        y, after = one(x, pool, sequences)
        assert torch.equal(pool, kept)
        assert after.shape == (2, 3, 70)
        sequences.write((pool,), (after,))
    if change != "empty":
        bounds = (0, 2, 6) if packed else (0, 3, 6)
        true, tail = loop(x.reshape(6, 70).double(), kept[slots].double(), one.weight[:, 0].double(), one.bias.double(), bounds, True)
        assert (y.reshape(6, 70) - true).norm() <= 1e-6 * true.norm()
        assert torch.equal(pool[slots], tail.to(pool.dtype))


@pytest.mark.parametrize("W", [1, 4])
@pytest.mark.parametrize(("shape", "ends"), [((2, 0), None), ((0, 3), None), ((1, 0), [0]), ((1, 0), [0, 0, 0])], ids=str)
def test_empty_calls(shape, ends, W, on_a_cpu):
    one = convolution_of(W)
    x = torch.zeros(*shape, 70, requires_grad=True)
    sequences = Sequences(x, None if ends is None else torch.tensor(ends))
    tail = normal(sequences.count, W - 1, 70).float()
    y, after = one(x, tail, sequences)
    assert y.shape == x.shape
    assert torch.equal(after, tail)
    dx, *grads = torch.autograd.grad(y.sum(), (x, *one.parameters()))
    assert dx.shape == x.shape
    assert all(grad.shape == parameter.shape and not grad.any() for grad, parameter in zip(grads, one.parameters()))
    assert on_a_cpu == ["convolved", "tails"]


@pytest.mark.parametrize("programs", [1, *slow(100)])
@pytest.mark.parametrize("tokens", [(0, 32, 40, 74), pytest.param((10, 31, 33, 34, 37, 71), marks=pytest.mark.slow)], ids=str)
def test_nan_stays_where_it_belongs(tokens, programs, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", programs)
    case, place = Case(4, PACKED, True, True, FLOAT32), slice(3, 4)
    starts, bounds = case.offsets()

    def run(change):
        x, tail, weight, bias = (one.clone() for one in case.draw())
        upstream = normal(75, 70).float()
        change(x, tail, upstream)
        leaves = [one.requires_grad_() for one in (x, weight, bias)]
        y, after = kernels.Convolution.apply(leaves[0], tail, starts, bounds, *leaves[1:], True, None)
        grads = torch.autograd.grad(y, leaves, upstream)
        assert not any(one.movedim(0, -1)[..., :3].isnan().any() for one in grads[1:])  # other channels
        return [
            *(one[:, place].isnan().any(1).nonzero().flatten().tolist() for one in (y, grads[0])),
            any(one.isnan().any() for one in grads[1:]),
            after,
        ]

    nan = float("nan")
    for token in tokens:
        begin, end = next((begin, end) for begin, end in pairwise(PACKED) if begin <= token < end)
        behind, around = [t for t in range(token, token + 4) if t < end], [t for t in range(token - 3, token + 4) if begin <= t < end]
        y, dx, any_sum, _ = run(lambda x, tail, d, token=token: x[token, place].fill_(nan))
        assert (y, dx, any_sum) == (behind, around, True)
        y, dx, any_sum, _ = run(lambda x, tail, d, token=token: d[token, place].fill_(nan))
        assert (y, dx, any_sum) == ([], [t for t in around if t <= token], True)
    for n in (0, 5):  # of empty sequences
        y, dx, any_sum, after = run(lambda x, tail, d, n=n: tail[n, :, place].fill_(nan))
        assert (y, dx, any_sum) == ([], [], False)
        assert after[n, :, place].isnan().all()
        assert after.isnan().sum() == 3
    y, dx, *_ = run(lambda x, tail, d: tail[1, 1, place].fill_(nan))
    assert (y, dx) == ([0, 1], [0, 1])


@pytest.mark.parametrize("without", [(), (1,), (0, 2), (0, 1, 2)], ids=str)
def test_tails_of_q_k_and_v_in_one_pool(without, on_a_cpu, monkeypatch):
    """Also where the kernel does not take some of them."""
    torch.manual_seed(0)
    mixer, results = GLAConfig(num_heads=2, conv_size=4, expand_k=1.0).build(24), []
    weights = [one.weight.data_ptr() for one in (mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d)]
    refused = {weights[n] for n in without}
    x, slots = normal(3, 5, 24).float(), torch.tensor([4, -1, 0])
    for refusal in (lambda *given: "none", lambda x, state, weight, bias: "this one" if weight.data_ptr() in refused else None):
        monkeypatch.setattr(module, "refusal", refusal)
        pool = mixer.initial_state(5, x)
        pool.tails.copy_(normal(*pool.tails.shape))
        y = [mixer.advance(part, pool, slots=slots)[[0, 2]] for part in x.split([1, 3, 1], 1)]
        packed = mixer.advance(x[:1], pool, cu_seqlens=torch.tensor([0, 2, 4, 5]), slots=slots)
        results.append([*y, packed[:, [0, 1, 4]], pool.tails])
    for wanted, found in zip(*results):
        torch.testing.assert_close(found, wanted)
    assert len(on_a_cpu) == 6 * (3 - len(without))


def test_no_gradient_comes_from_behind_the_last_token():
    """There a weighted input would be infinite, and the slope of silu NaN."""
    case = Case(4, PACKED, True, True, FLOAT32)
    x, tail, weight, bias = case.draw()
    x[[39, 74], 3], weight[3] = 3e38, torch.tensor([10.0, 0.1, 0.1, 0.1])
    leaves = [one.requires_grad_() for one in (x, weight, bias)]
    y, _ = kernels.Convolution.apply(leaves[0], tail, *case.offsets(), *leaves[1:], True, None)
    assert y.isfinite().all()
    grads = torch.autograd.grad(y, leaves, torch.full_like(y, 1e-3))
    assert all(one.isfinite().all() for one in grads)


def test_nan_in_one_row_of_a_step_stays_there(on_a_cpu):
    one, x, pool = convolution_of(4), normal(3, 1, 70).float(), normal(5, 3, 70).float()
    x[1, 0, 3] = pool[0, 2, 5] = pool[3, 1, 6] = pool[2, 0, 7] = float("nan")
    with torch.no_grad():
        y, _ = one(x, pool, Sequences(x, None, torch.tensor([4, 0, -1]), in_place=True))
    assert y.isnan().nonzero().tolist() == [[1, 0, 3], [1, 0, 5]]
    assert pool.isnan().nonzero().tolist() == [[0, 1, 5], [0, 2, 3], [2, 0, 7], [3, 1, 6]]


@pytest.mark.parametrize("layout", ["channels", "batch", "shared"])
def test_inputs_of_any_strides(layout, on_a_cpu):
    one = convolution_of(4)
    x = {
        "channels": normal(2, 70, 9).float().mT,
        "batch": normal(9, 2, 70).float().transpose(0, 1),
        "shared": normal(1, 1, 70).float().expand(2, 9, 70),
    }[layout]
    for parameter in one.parameters():
        parameter.data = torch.stack([parameter.data, torch.full_like(parameter.data, torch.nan)], -1)[..., 0]
    tail, leaf = normal(2, 3, 140).float()[..., ::2], x.clone().requires_grad_()
    true, tails = loop(x.reshape(18, 70).double(), tail.double(), one.weight[:, 0].double(), one.bias.double(), (0, 9, 18), True)
    y, after = one(x.requires_grad_(), tail, Sequences(x))
    assert (y.reshape(18, 70) - true).norm() <= 1e-6 * true.norm()
    assert torch.equal(after.double(), tails)
    again, _ = one(leaf, tail, Sequences(x))
    upstream = torch.ones(1).expand(2, 9, 70)
    inputs = (x, *one.parameters()), (leaf, *one.parameters())
    grads = [torch.autograd.grad(result, given, upstream) for result, given in zip((y, again), inputs)]
    assert all(torch.equal(one, other) for one, other in zip(*grads))


def test_the_backward_pass_keeps_no_tensor_of_its_own(on_a_cpu):
    """It keeps the projection of which x is a part, the tail, the weights and where sequences begin."""
    one, wide, kept = convolution_of(4), normal(2, 9, 100).float().requires_grad_(), []
    sequences, tail = Sequences(wide), torch.zeros(2, 3, 70)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        one(wide[..., 10:80], tail, sequences)
    allowed = {x.untyped_storage().data_ptr() for x in (wide, tail, sequences.starts, *one.parameters())}
    assert {x.untyped_storage().data_ptr() for x in kept} == allowed


def test_other_widths_and_dtypes_are_those_of_torch(on_a_cpu):
    for one, dtype in ((convolution_of(9), FLOAT32), (convolution_of(4, dtype=FLOAT64), FLOAT64)):
        x = normal(2, 5, 70).to(dtype)
        tail = one.initial_state(2, x)
        y, _ = one(x, tail, Sequences(x))
        true, _ = loop(x.view(10, 70).double(), tail.double(), one.weight[:, 0].double(), one.bias.double(), (0, 5, 10), True)
        assert (y.view(10, 70) - true).norm() <= 1e-6 * true.norm()
    assert not on_a_cpu


def test_weights_may_be_wider_than_tokens(on_a_cpu):
    """As under autocast, where products give float16."""
    one, x = convolution_of(4), normal(2, 5, 70).half().requires_grad_()
    tail = one.initial_state(2, normal(1).float())
    with torch.autocast("cpu", dtype=FLOAT16):
        y, after = one(x, tail, Sequences(x))
    assert y.dtype == after.dtype == FLOAT16
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, *one.parameters())]
    true, _ = loop(exact[0].view(10, 70), tail.double(), exact[1][:, 0], exact[2], (0, 5, 10), True)
    grads, wanted = (torch.autograd.grad(r.sum(), leaves) for r, leaves in ((y, (x, *one.parameters())), (true, exact)))
    for found, formula in zip((y.view(10, 70), *grads), (true, *wanted)):
        assert (found.double() - formula).norm() <= torch.finfo(FLOAT16).eps * formula.norm()
    assert grads[1].dtype == FLOAT32


def test_inputs_of_other_channels_raise(on_a_cpu):
    one, x = convolution_of(4), normal(2, 5, 69).float()
    with pytest.raises(RuntimeError):
        one(x, normal(2, 3, 69).float(), Sequences(x))
    assert on_a_cpu == []
