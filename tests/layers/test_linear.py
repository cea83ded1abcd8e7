"""Linear maps of few tokens on a CPU, and those of one input in training."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.layers import GLAConfig, SwiGLUConfig
from penstock.layers.cpu import linear as native
from penstock.layers.linear import Linear, linear, linears
from penstock.layers.modes import PLAIN, Mode, in_graph, mode, rows_alike, zeros
from penstock.layers.quantization import KINDS
from penstock.layers.quantized import QUANTIZED_LINEAR, QuantizedLinear, _call
from penstock.layers.shared_input import linears_of

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
        linear(x, torch.randn(5, 16)[:, ::2])  # neither rows nor columns of the weight are contiguous
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


def test_weights_whose_memory_was_freed_raise_as_in_torch(used):
    """As that of sharded parameters is between passes."""
    for weight in (torch.zeros(5, 8), torch.zeros(8, 5).T):
        weight.untyped_storage().resize_(0)
        with torch.no_grad(), pytest.raises(RuntimeError, match="storage"):
            linear(torch.zeros(2, 8), weight)
        with torch.no_grad():
            assert linears([torch.zeros(2, 8)], [weight]) is None
    one = QuantizedLinear.of(Linear(72, 5), "int8")
    one.codes.untyped_storage().resize_(0)
    assert QUANTIZED_LINEAR.form("native").refuses(_call(torch.zeros(2, 72), one.quantized, None)) == "a tensor has no memory"
    assert not used


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("shape", "kind"), [*(((8, 0), kind) for kind in (None, *KINDS)), ((0, 8), None), ((0, 0), None), ((0, 8), "int4")]
)
def test_maps_without_inputs_or_outputs(shape, kind, used):
    layer = Linear(*shape)
    layer = layer if kind is None else QuantizedLinear.of(layer, kind)
    for rows in (0, 3, 40):
        x = torch.randn(rows, shape[0])
        torch.testing.assert_close(layer(x), layer.bias.expand(rows, shape[1]), check_stride=False)


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


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("gradients", [False, True])
def test_exported_graphs_take_any_number_of_rows(kind, gradients):
    """They have torch's operators alone."""
    layer, rows = Linear(72, 5), torch.export.Dim("rows", min=2)
    layer = layer if kind is None else QuantizedLinear.of(layer, kind)
    with torch.set_grad_enabled(gradients):
        exported = torch.export.export(layer, (torch.randn(3, 72),), dynamic_shapes=({0: rows},))
        assert all(one.target.namespace == "aten" for one in exported.graph.nodes if one.op == "call_function")
        for count in (2, 31, 32, 100):
            x = torch.randn(count, 72)
            torch.testing.assert_close(exported.module()(x), layer(x))


def test_the_operator_of_compiled_graphs():
    torch.library.opcheck(torch.ops.penstock.linear_of_few_rows, (torch.randn(2, 3, 8), torch.randn(5, 8)))


def maps_of(*outputs, dtype=torch.float64, bias=False):
    torch.manual_seed(0)
    return [Linear(12, count, bias=bias, dtype=dtype) for count in outputs]


def separate(x, maps):
    return [nn.functional.linear(x, one.weight, one.bias) for one in maps]


@pytest.mark.parametrize("shape", [(2, 5, 12), (7, 12), (0, 12), (1, 12)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_maps_of_one_input_have_the_gradients_of_separate_maps(dtype, shape):
    maps, x = maps_of(8, 3, 12, 1, dtype=dtype), torch.randn(shape).to(dtype).requires_grad_()
    exact, true = [one.double() for one in maps_of(8, 3, 12, 1, dtype=dtype)], x.detach().double().requires_grad_()
    results, wanted = linears_of(x, maps), separate(true, exact)
    assert all(torch.equal(y, one) for y, one in zip(results, separate(x, maps)))
    assert all("SharedInput" in y.grad_fn.name() for y in results)
    upstream = [torch.randn(*y.shape[:-1], 2 * y.shape[-1])[..., ::2].to(dtype) for y in results]  # not contiguous
    torch.autograd.backward(results, upstream)
    torch.autograd.backward(wanted, [d.double() for d in upstream])
    for found, one in zip((x, *(one.weight for one in maps)), (true, *(one.weight for one in exact))):
        assert (found.grad - one.grad).norm() <= 2 * torch.finfo(dtype).eps * one.grad.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_of_the_backward_pass_alone_rounds_nothing(dtype):
    maps, x = maps_of(8, 3, 12, dtype=torch.float32), torch.randn(7, 12, requires_grad=True)
    weights = [one.weight for one in maps]
    wanted = torch.autograd.grad(sum(y.square().sum() for y in linears_of(x, maps)), (x, *weights))
    loss = sum(y.square().sum() for y in linears_of(x, maps))
    with torch.autocast("cpu", dtype):
        found = torch.autograd.grad(loss, (x, *weights))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted))


def test_derivatives_of_maps_of_one_input():
    maps, x = maps_of(8, 3), torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    weights = [one.weight for one in maps]

    def results(x, *weights):
        return torch.cat([y.sin() for y in linears_of(x, maps)], -1)

    assert torch.autograd.gradcheck(results, (x, *weights))
    assert torch.autograd.gradgradcheck(results, (x, *weights))


def test_maps_of_one_input_whose_results_are_not_all_used():
    maps, x = maps_of(8, 3, 5), torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    maps[0].weight.requires_grad_(False)
    for used in ((0,), (1,), (0, 2)):
        results, wanted = linears_of(x, maps), separate(x, maps)
        weights = [maps[n].weight for n in used if n]
        found, exact = (torch.autograd.grad(sum(one[n].square().sum() for n in used), (x, *weights)) for one in (results, wanted))
        for one, other in zip(found, exact):
            torch.testing.assert_close(one, other)
    linears_of(x, maps)[1].sum().backward()
    assert maps[0].weight.grad is None
    assert maps[2].weight.grad is None


class Sums(TorchDispatchMode):
    """Counts sums of tensors of one size."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        y = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_) and y.shape == self.size:
            self.count += 1
        return y


@pytest.mark.parametrize("config", [GLAConfig(num_heads=2), SwiGLUConfig(24)], ids=lambda one: one.kind)
def test_gradients_of_an_input_of_several_maps_are_not_summed_apart(config):
    mixer, x = config.build(16), torch.randn(2, 5, 16, requires_grad=True)
    counts, ran = [], set()
    for hooked in (False, True):
        if hooked:  # then each map runs as a module
            for one in mixer.modules():
                one.register_forward_hook(lambda module, given, result: ran.add(module))
        y, _ = mixer(x)
        with Sums(x.shape) as sums:
            y.sum().backward()
        counts.append(sums.count)
    assert counts[0] == 0
    assert counts[1] >= 1
    assert {one for one in mixer.modules() if isinstance(one, (nn.Linear, nn.Sequential))} <= ran


def test_maps_of_one_input_that_run_apart():
    maps, x = maps_of(8, 3, dtype=torch.float32), torch.randn(4, 12, requires_grad=True)

    def apart(x, maps):
        return all("SharedInput" not in str(y.grad_fn) for y in linears_of(x, maps))

    assert not apart(x, maps)
    assert apart(x.detach(), maps)
    assert apart(x, maps[:1])
    assert apart(x, maps_of(8, 3, dtype=torch.float32, bias=True))
    assert apart(x, [maps[0], nn.Linear(12, 3)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not apart(x, maps)
        assert linears_of(x, maps)[0].dtype == torch.bfloat16
    with torch.no_grad():
        assert apart(x, maps)
    assert torch.func.grad(lambda x: sum(y.sum() for y in linears_of(x, maps)))(x.detach()).shape == x.shape
    with pytest.raises(RuntimeError):
        linears_of(x, [maps[0], Linear(12, 3, dtype=torch.float64)])
    maps[1].register_forward_hook(lambda module, given, result: result + 1)
    torch.testing.assert_close(linears_of(x, maps)[1], separate(x, maps)[1] + 1)


def test_launches_of_a_context_share_zeros_and_each_graph_has_its_own():
    """A graph may be captured inside of a batch-invariant step, and is replayed when that is over."""
    made = partial(zeros, torch.device("cpu"), 4)
    assert made() is not made()
    with rows_alike():
        outer, found = made(), []
        for _ in range(2):
            with rows_alike(), in_graph():
                found.append(made())
                with rows_alike():
                    assert made() is found[-1]
                with pytest.raises(KeyError), rows_alike():
                    raise KeyError
                assert mode() == Mode(alike=True, graph=True)
                assert made() is found[-1]
        assert made() is outer
        assert mode() == Mode(alike=True)
    assert len({id(one) for one in (outer, *found)}) == 3
    assert mode() == PLAIN
