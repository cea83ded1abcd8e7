"""Native kernels of decode steps on a CPU: products in one call, norms with token shifts, the recurrence of RWKV-5 and RWKV-6."""

import pytest
import torch
from architectures import SIZES, model_of

from penstock.layers.chains import Choice, recorded
from penstock.layers.cpu import absent, decode
from penstock.layers.cpu.linear import Product, linear, products
from penstock.layers.linear import linears
from penstock.layers.modes import rows_alike
from penstock.layers.sequences import Sequences

pytestmark = [
    pytest.mark.skipif(absent("products", torch.device("cpu")) is not None, reason="the native library is not built"),
    pytest.mark.sampled(file=True),
]
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def far(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 3), (7, 8), (64, 100), (33, 2049), (300, 64), (520, 16)])
def test_weights_stored_by_columns_equal_the_formula(outputs, inputs, dtype):
    """Whatever the number of rows, and to the bit."""
    weight, x = normal(inputs, outputs, seed=1, dtype=dtype), normal(70, inputs, dtype=dtype)
    (whole,) = products([Product(x, weight, transposed=True)])
    assert far(whole, x.double() @ weight.double()) <= DTYPES[dtype]
    if outputs > 1 < inputs:
        assert torch.equal(linear(x, weight.T), whole)
    for count in (1, 2, 3, 5, 31):
        for some in (slice(0, count), slice(70 - count, 70)):
            assert torch.equal(products([Product(x[some], weight, transposed=True)])[0], whole[some])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 6, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_one_call_are_those_of_single_calls(dtype, rows, threads):
    sizes = [(48, 520, False), (48, 40, True), (48, 7, False), (48, 260, True)]
    given = [
        Product(normal(rows, K, seed=n, dtype=dtype), normal(*((K, N) if columns else (N, K)), seed=9 + n, dtype=dtype), transposed=columns)
        for n, (K, N, columns) in enumerate(sizes)
    ]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = products(given)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, products([each])[0]) for one, each in zip(found, given))


@pytest.mark.parametrize("rows", [1, 6, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("kind", ["tanh", "sigmoid", "relu_squared", "gate", "shift"])
def test_what_is_done_to_inputs_and_results(kind, columns, dtype, rows):
    K, N = 40, 270
    x, weight, other, gate = (normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate([(rows, K), (N, K), (rows, N), (rows, N)]))
    mu = normal(N, seed=7)
    wide, activations = x.double(), {"tanh": torch.tanh, "sigmoid": torch.sigmoid}
    y = activations.get(kind, lambda x: x)(wide) @ weight.double().T
    wanted = {
        "relu_squared": lambda: y.relu().square(),
        "gate": lambda: y * gate.double().sigmoid(),
        "shift": lambda: other.double() + (gate.double() - other.double()) * (mu.double() + y),
    }.get(kind, lambda: y)()
    options = {"relu_squared": {"relu_squared": True}, "gate": {"gate": gate}, "shift": {"shift": (other, gate, mu)}}.get(kind, {})
    made = Product(x, weight.T.contiguous() if columns else weight, kind if kind in activations else None, transposed=columns, **options)
    (found,) = products([made])
    assert found.dtype == dtype
    assert far(found, wanted) <= DTYPES[dtype]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e4, -1e4])
def test_activations_of_extreme_inputs(value):
    x, one = torch.full((1, 1), value), torch.ones(1, 1)
    for kind in ("tanh", "sigmoid"):
        torch.testing.assert_close(products([Product(x, one, kind)])[0], getattr(torch, kind)(x), equal_nan=True)
    torch.testing.assert_close(products([Product(x, one, relu_squared=True)])[0], x.relu().square(), equal_nan=True)


@torch.no_grad()
def test_other_calls_take_no_kernel():
    x, weight = normal(3, 40), normal(24, 40)
    assert linears([x], [weight]) is not None
    assert linears([x], [weight.double()]) is None
    assert linears([x, x[:, :8]], [weight, weight[:, :8]]) is None
    assert linears([x], [weight.bfloat16()]) is None
    assert linears([normal(3, 20)], [weight[:, ::2]]) is None
    assert linears([normal(0, 40)], [weight]) is None
    assert linears([normal(3, 41)], [weight]) is None
    assert linears([normal(32, 40)], [weight]) is None
    with rows_alike():
        assert linears([normal(32, 40)], [weight]) is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linears([x], [weight]) is None
    with torch.enable_grad():
        assert linears([x], [weight]) is None


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("C", [8, 72, 1031])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float64])
def test_norms_and_shifts_with_skipped_rows(C, centre, pool_dtype):
    """A negative slot changes no row; its result is that of a previous token of zeros."""
    x, y, weight, bias, factors = normal(3, 1, C), normal(3, 1, C, seed=1), normal(C, seed=2), normal(C, seed=3), normal(2, C, seed=4)
    pool, slots = normal(5, C + 1, seed=5, dtype=pool_dtype)[:, :C], torch.tensor([4, -1, 0])
    kept = pool.clone()
    options = {"centre": centre, "complement": False, "kept": True}
    total, z, before, mixed = decode.shifted_norm(x, y, weight, bias if centre else None, 1e-5, pool, slots, [*factors], **options)
    assert torch.equal(total, x + y)
    norm = torch.nn.functional.layer_norm if centre else torch.nn.functional.rms_norm
    wanted = norm(total.double(), (C,), weight.double(), *([bias.double()] if centre else []), eps=1e-5)
    assert far(z, wanted) < 1e-6
    last = torch.stack([kept[4], torch.zeros(C, dtype=pool_dtype), kept[0]])[:, None].float()
    assert torch.equal(before, last)
    for one, factor in zip(mixed, factors):
        assert far(one, wanted + (last - wanted) * factor) < 1e-6
    assert torch.equal(pool[[4, 0]], z[[0, 2], 0].to(pool_dtype))
    assert torch.equal(pool[1:4], kept[1:4])


@pytest.mark.parametrize("log", [-0.4, -2.0, -9.0, -24.0, 90.0])
def test_what_a_decay_leaves_is_exact(log):
    """A weak decay is not rounded to 1."""
    H, K, V = 2, 10, 13
    r, k, gate = (normal(1, 1, H * size, seed=n) for n, size in enumerate((K, K, V)))
    pool, weight = normal(1, H, K, V, seed=5), torch.ones(H * V)
    kept = pool.double()
    bias = torch.full((H, 1), float(-log)).log().nan_to_num(0) if log < 0 else torch.full((H, 1), log)
    decode.rwkv_step(r, k, torch.zeros(1, 1, H * V), gate, normal(H, K), bias.expand(H, K), None, pool, None, weight, weight, 1e-3)
    wanted = kept * (-bias[0].double().exp()).exp()
    assert ((pool.double() - wanted).abs() <= 2e-6 * wanted.abs()).all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["rwkv5.1", "rwkv5.2", "rwkv6", "rwkv7"])
def test_decode_steps_of_models(name, dtype):
    """They are those of whole sequences, and a token alone has the bits that it has among others."""
    model = model_of(name, dtype)
    ids = torch.randint(SIZES["vocab_size"], (5, 4), generator=torch.Generator().manual_seed(2))
    pool = model.initial_state(7)
    slots = torch.tensor([2, 0, 6, 1, 5])
    with recorded(model) as found:
        logits = torch.stack([model.advance(ids[:, t : t + 1], pool, slots=slots, last_only=True) for t in range(4)], 1)
    forms = {(one.chain, one.form) for one in found if isinstance(one, Choice)}
    step = "rwkv7_step" if name == "rwkv7" else "rwkv_step"
    assert {("shifted_norm", "native"), ("linears", "native"), (step, "native"), ("update_mixer", "step")} <= forms
    assert far(logits.double(), model_of(name, torch.float64)(ids).logits) < (1e-5 if dtype == torch.float32 else 3e-2)
    for row in (0, 3):
        single = model.initial_state(1)
        alone = torch.stack([model.advance(ids[row : row + 1, t : t + 1], single, last_only=True) for t in range(4)], 1)
        assert torch.equal(alone[0], logits[row])


@torch.no_grad()
@pytest.mark.parametrize("name", ["rwkv5.1", "rwkv5.2", "rwkv6", "rwkv7"])
def test_a_norm_with_another_number_of_groups_is_computed_as_written(name):
    """In every pass, as with a hook, which makes it run as a module."""
    model, ids = model_of(name), torch.randint(SIZES["vocab_size"], (2, 4), generator=torch.Generator().manual_seed(2))
    before = model(ids).logits
    for layer in model.layers:
        layer.mixer.ln_x.num_groups = 1
    pool, found = model.initial_state(2), [model(ids).logits]
    found.append(torch.cat([model.advance(ids[:, t : t + 1], pool) for t in range(4)], 1))
    for layer in model.layers:
        layer.mixer.ln_x.register_forward_hook(lambda *_: None)
    wanted = model(ids).logits
    assert far(wanted, before) > 1e-3
    assert all(far(one, wanted) < 1e-5 for one in found)


def test_slots_are_converted_once():
    sequences = Sequences(torch.zeros(2, 1, 4), slots=torch.tensor([1, 0], dtype=torch.int32), in_place=True)
    assert sequences.places is sequences.places
    assert sequences.places.dtype == torch.int64
