"""The operators inside PyTorch: opcheck, compile, export, autocast, inference mode, meta and fake tensors, threads."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from attention import Attention
from cases import NAMES, Case, call, draw, offsets, upstream
from contract import measured, run
from sampling import every, slow
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock as ps
from penstock.recurrence.variants import VARIANTS

SMALL = {variant: Case(variant, T=9, K=8, V=4) for variant in VARIANTS}
CASES = [
    *SMALL.values(),
    *(
        replace(SMALL[variant], **options)
        for variant in ("retention", "rwkv6")
        for options in (
            {"lengths": (4, 0, 5)},
            {"state": False, "reverse": True},
            {"strided": True},
            {"strided": True, "dtype": torch.float64},
            {"T": 0, "dtype": torch.float64},
            {"dtype": torch.bfloat16, "others": torch.float32, "lengths": (4, 0, 5)},
        )
    ),
]
"""All variants, and layouts and dtypes with two of them."""
BACKENDS = ["aot_eager"] + ["inductor"] * bool(shutil.which("g++"))


@pytest.fixture(autouse=True)
def _reset_compiler():
    torch.compiler.reset()


def operator_arguments(case, tensors):
    """Arguments of both passes."""
    *others, state = tensors.values()
    return (*others, offsets(case), state, case.variant, case.scale, case.reverse, True)


@pytest.mark.parametrize("case", every(2, CASES), ids=str)
def test_opcheck_forward(case):
    tensors = {name: None if x is None else x.requires_grad_() for name, x in draw(case).items()}
    torch.library.opcheck(torch.ops.penstock.recurrence.default, (*operator_arguments(case, tensors), "auto"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_backward(case):
    d_output, d_final_state = upstream(case)
    arguments = (d_output, d_final_state if case.state else None, *operator_arguments(case, draw(case)), "auto")
    torch.library.opcheck(torch.ops.penstock.recurrence_backward.default, arguments)


@pytest.mark.parametrize("slots", [None, [5, -1]], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_advance(variant, slots):
    case = Case(variant, T=2, state=False)
    tensors = list(draw(case).values())[:5]
    state = torch.randn(2 if slots is None else 6, case.H, case.K, case.V)
    torch.library.opcheck(
        torch.ops.penstock.advance.default,
        (*tensors, None, None if slots is None else torch.tensor(slots), state, f"decode_step({variant!r})", None, "auto"),
    )


@pytest.mark.parametrize("impl", ["triton", "sdpa"])
@pytest.mark.parametrize("case", [Attention(Tq=9, Tk=9, D=16), Attention(lengths=((4, 4), (0, 0), (5, 7)), window=3)], ids=str)
def test_opcheck_softmax_attention(case, impl):
    tensors, upstream = case.drawn("cpu")
    leaves = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in tensors.values()]
    arguments = (*leaves, case.function, *case.options, impl)
    torch.library.opcheck(torch.ops.penstock.softmax_attention.default, arguments)
    saved = [x.detach() for x in torch.ops.penstock.softmax_attention(*arguments)]
    given = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    torch.library.opcheck(torch.ops.penstock.softmax_attention_backward.default, (*upstream, *saved, *given))


def test_compiled_softmax_attention():
    case = Attention(Tq=40, Tk=40, window=9)
    tensors, upstream = case.drawn("cpu")
    compiled = torch.compile(lambda tensors: case.call(tensors, "auto"), fullgraph=True, backend="aot_eager")
    wanted = run(case, tensors, upstream, "auto")
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None}
    results = compiled(tensors | leaves)
    found = [*results, *torch.autograd.grad(results, list(leaves.values()), upstream)]
    for x, y in zip(found, wanted.values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("impl", "dtype"), [*((impl, torch.float32) for impl in NAMES), *((impl, torch.float64) for impl in NAMES if impl != "cpu")]
)
def test_results_are_contiguous_and_new(impl, dtype):
    """For all implementations and layouts of inputs, as fake kernels declare."""
    for case in (
        Case("rwkv6", strided=True, dtype=dtype),
        Case("gla", T=0, strided=True, dtype=dtype),
        Case("retention", reverse=True, dtype=dtype),
    ):
        tensors, grads = draw(case), upstream(case)
        arguments = operator_arguments(case, tensors)
        results = [*torch.ops.penstock.recurrence(*arguments, impl), *torch.ops.penstock.recurrence_backward(*grads, *arguments, impl)]
        inputs = {x.untyped_storage().data_ptr() for x in (*tensors.values(), *grads) if x is not None and x.numel()}
        for x in results:
            assert x.is_contiguous()
            assert not x.requires_grad
            assert not x.numel() or x.untyped_storage().data_ptr() not in inputs


def train(function, case):
    """Results and gradients of a function of the tensors of a case."""
    tensors = {name: None if x is None else x.requires_grad_() for name, x in draw(case).items()}
    result = function(case, tensors, "auto")
    grads = torch.autograd.grad(result, [x for x in tensors.values() if x is not None], upstream(case))
    return [x.detach() for x in (*result, *grads)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_results_equal_eager_results(case):
    found = train(torch.compile(call, fullgraph=True, backend="aot_eager"), case)
    assert all(torch.equal(one, other) for one, other in zip(found, train(call, case), strict=True))


@pytest.mark.parametrize("backend", [BACKENDS[-1], *slow(*BACKENDS[:-1])])
def test_compiled_with_other_operations(backend):
    """A gate computed on the fly, a normalised read, gradients of everything."""

    def layer(q, k, v, x):
        g = torch.nn.functional.logsigmoid(x) / 16
        return torch.nn.functional.layer_norm(ps.gla(torch.nn.functional.silu(q), k, v, g).output, (8,)).square().mean()

    def run(function):
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(2, 9, 2, 8, generator=generator).requires_grad_() for _ in range(4)]
        loss = function(*inputs)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    for found, wanted in zip(run(torch.compile(layer, fullgraph=True, backend=backend)), run(layer)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_once_for_all_lengths(variant):
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (9, 21):
            case = Case(variant, T=T)
            assert all(torch.equal(one, other) for one, other in zip(train(compiled, case), train(call, case), strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_decode_step_updates_the_pool(variant):
    case = Case(variant, T=1, state=False)
    tensors = list(draw(case).values())[:5]
    states = [torch.ones(4, case.H, case.K, case.V) for _ in range(2)]
    compiled = torch.compile(ps.decode_step, fullgraph=True, backend="aot_eager")
    found, wanted = (f(variant, *tensors, state=s, slots=torch.tensor([3, 1])) for f, s in zip((compiled, ps.decode_step), states))
    assert torch.equal(found, wanted)
    assert torch.equal(*states)
    assert states[0][3].ne(1).any()
    assert states[0][2].eq(1).all()


class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 4 * 16)

    def forward(self, x):
        q, k, v, g = self.project(x).unflatten(-1, (4, 2, 8)).unbind(-3)
        return ps.gla(q, k, v, torch.nn.functional.logsigmoid(g)).output.flatten(-2)


def test_exported():
    """The graph contains the operator and equals the module, also at other lengths."""
    module = Mixer()
    exported = torch.export.export(module, (torch.randn(2, 9, 16),), dynamic_shapes=({1: torch.export.Dim("T", min=2)},))
    assert "torch.ops.penstock.recurrence.default" in exported.graph_module.code
    for T in (9, 30):
        x = torch.randn(2, T, 16)
        torch.testing.assert_close(exported.module()(x), module(x))


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast(variant):
    """q, k and v are cast, as for a matrix product; decays, bonus and states are not; gradients come back in float32."""
    case = Case(variant, T=33)
    tensors = {name: None if x is None else x.requires_grad_() for name, x in draw(case).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = call(case, tensors, "auto")
        found = torch.autograd.grad(result.output.float().sum(), [x for x in tensors.values() if x is not None])
    cast = {name: x.bfloat16() if name in "qkv" and x is not None else x for name, x in draw(case).items()}
    wanted = call(case, cast, "auto")
    assert result.output.dtype == torch.bfloat16
    assert result.final_state.dtype == torch.float32
    assert torch.equal(result.output, wanted.output)
    assert torch.equal(result.final_state, wanted.final_state)
    assert {grad.dtype for grad in found} == {torch.float32}
    exact = call(case, draw(case), "reference").output
    assert (result.output.float() - exact).norm() <= 4 * 2**-8 * exact.norm()  # one rounding of each of q, k, v and the output


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_decode_step(variant):
    case = Case(variant, T=2, state=False)
    tensors = list(draw(case).values())[:5]
    cast = [x if x is None or i > 2 else x.bfloat16() for i, x in enumerate(tensors)]
    states = [torch.ones(2, case.H, case.K, case.V) for _ in range(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ps.decode_step(variant, *tensors, state=states[0])
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, ps.decode_step(variant, *cast, state=states[1]))
    assert torch.equal(*states)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_grad_and_inference_mode(variant, mode):
    case = Case(variant)
    tensors = {name: None if x is None else x.requires_grad_() for name, x in draw(case).items()}
    wanted = call(case, draw(case), "auto")
    with mode():
        result = call(case, tensors, "auto")
        state = result.final_state.clone()
        ps.decode_step(variant, *list(draw(replace(case, T=1)).values())[:5], state=state)
    assert not result.output.requires_grad
    assert all(torch.equal(one, other) for one, other in zip(result, wanted))
    assert not torch.equal(state, wanted.final_state)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_meta_and_fake_tensors(case):
    """On the meta device and as fake tensors: shapes, dtypes and layout as with data, of gradients too."""
    real = measured(case, "auto")

    def seen(where):
        tensors = {name: None if x is None else where(x).requires_grad_() for name, x in draw(case).items()}
        ends = offsets(case)
        result = call(case, tensors, "auto", cu_seqlens=ends if ends is None else where(ends))
        inputs = [x for x in tensors.values() if x is not None]
        grads = torch.autograd.grad(result, inputs, [where(d) for d in upstream(case)])
        return [(x.shape, x.dtype, x.stride(), x.device.type) for x in (*result, *grads)]

    assert seen(lambda x: x.to("meta")) == [(x.shape, x.dtype, x.stride(), "meta") for x in real.values()]
    fake = FakeTensorMode()
    with fake:
        assert seen(fake.from_tensor) == [(x.shape, x.dtype, x.stride(), "cpu") for x in real.values()]


THREADED = [Case(variant, T=130, B=3, H=5, K=32, V=40) for variant in VARIANTS] + [Case("rwkv6", H=4, K=32, V=64, lengths=(1, 200, 0, 77))]


@pytest.mark.parametrize("impl", ["cpu", "auto"])
@pytest.mark.parametrize("case", THREADED, ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(case, impl):
    """Enough work for several threads to be started, see THREAD_WORK of the native kernels."""
    torch.set_num_threads(1)
    wanted = measured(case, impl)
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        found = measured(case, impl)
        assert all(torch.equal(x, wanted[name]) for name, x in found.items())


@pytest.mark.parametrize("impl", NAMES)
def test_concurrent_calls(impl):
    cases = [Case(variant, T=33) for variant in VARIANTS] * 3
    wanted = [measured(case, impl) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for found, one in zip(pool.map(lambda case: measured(case, impl), cases), wanted):
            assert all(torch.equal(x, one[name]) for name, x in found.items())
