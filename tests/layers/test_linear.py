"""Linear maps of few tokens on a CPU."""

import pytest
import torch

from penstock.layers.linear import Linear, linear
from penstock.recurrence.cpu import linear as native

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SIZES = [(1, 1), (5, 3), (7, 8), (64, 100), (33, 2049), (300, 64)]


@pytest.fixture
def used(monkeypatch):
    """The row counts of calls of the native kernel."""
    counts, whole = [], native.linear

    def watched(x, weight):
        counts.append(x.numel() // weight.shape[1])
        return whole(x, weight)

    monkeypatch.setattr(native, "linear", watched)
    return counts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_few_rows_equal_the_formula(dtype, outputs, inputs, used):
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(2, 3, inputs).to(dtype)
    wanted = x.double() @ weight.double().T
    found = linear(x, weight)
    assert used == [6]
    assert found.dtype == dtype
    assert found.shape == (2, 3, outputs)
    assert (found - wanted).norm() <= DTYPES[dtype] * wanted.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_bits_do_not_depend_on_the_number_of_rows(dtype, outputs, inputs):
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(31, inputs).to(dtype)
    whole = linear(x, weight)
    for count in range(1, 31):
        assert torch.equal(linear(x[:count], weight), whole[:count])
        assert torch.equal(linear(x[-count:], weight), whole[-count:])


def test_bits_do_not_depend_on_the_number_of_threads(used):
    weight, x = torch.randn(1031, 515), torch.randn(3, 515)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(linear(x, weight))
    finally:
        torch.set_num_threads(threads)
    assert used == [3, 3, 3]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_strides_and_bias(used):
    weight, x, bias = torch.randn(9, 40)[:, 3:20], torch.randn(17, 4).T, torch.randn(9)
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.T + bias)
    assert used == [4]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_in_their_row(value):
    weight, x = torch.randn(5, 19), torch.randn(6, 19)
    wanted = linear(x, weight)
    x[2, 18] = value
    found = linear(x, weight)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3, 4, 5]], wanted[[0, 1, 3, 4, 5]])


def test_other_calls_are_torch_products(used):
    layer, x = Linear(8, 5), torch.randn(3, 8)
    layer(x).sum().backward()  # gradients
    assert layer.weight.grad is not None
    with torch.no_grad():
        torch.testing.assert_close(layer.double()(x.double()), x.double() @ layer.weight.T + layer.bias)
        layer.float()
        layer(torch.randn(32, 8))  # many rows
        layer(torch.randn(0, 8))
        linear(x, torch.randn(8, 5).T)  # rows of the weight are not contiguous
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        torch.func.vmap(layer)(x)
        with pytest.raises(RuntimeError):
            layer(torch.randn(3, 7))
        with pytest.raises(RuntimeError):
            layer(x.bfloat16())
    assert not used


WRONG = {
    "bias of another length": (torch.zeros(1, 8), torch.zeros(7)),
    "bias with more axes": (torch.zeros(5, 8), torch.zeros(3, 2, 5)),
    "bias in float64": (torch.zeros(5, 8), torch.zeros(5).double()),
    "bias in bfloat16": (torch.zeros(5, 8), torch.zeros(5).bfloat16()),
    "weight of three axes": (torch.zeros(2, 8, 8), None),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_raise_as_in_torch(case, used):
    weight, bias = WRONG[case]
    with torch.no_grad(), pytest.raises(RuntimeError):
        linear(torch.zeros(2, 8), weight, bias)
    assert not used


def test_a_weight_may_have_one_axis(used):
    weight, x = torch.randn(8), torch.randn(3, 8)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
    assert not used


def test_the_kernel_does_not_read_other_devices():
    assert not native.takes(torch.zeros(2, 8), torch.zeros(5, 8, device="meta"))


def test_compiled_graphs_have_the_kernel(used):
    layer, x = Linear(8, 5), torch.randn(3, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
    assert used == [3, 3]
    compiled(x).sum().backward()
    assert used == [3, 3]
    assert layer.weight.grad is not None


def test_the_operator_of_compiled_graphs():
    torch.library.opcheck(torch.ops.penstock.linear_of_few_rows, (torch.randn(2, 3, 8), torch.randn(5, 8)))
