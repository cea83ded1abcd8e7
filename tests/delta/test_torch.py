"""The delta rule inside PyTorch: opcheck, compile, export, autocast, inference mode, meta tensors."""

from dataclasses import replace

import pytest
import torch
from cases import upstream
from deltas import VARIANTS, Delta, named
from sampling import every
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock as ps
from penstock.delta.operators import ADVANCE, DELTA

SMALL = {variant: Delta(variant, T=9, K=8, V=4, H=2) for variant in VARIANTS}
CASES = [
    *SMALL.values(),
    *(
        replace(SMALL[variant], **options)
        for variant in ("kda", "rwkv7")
        for options in (
            {"lengths": (4, 0, 5)},
            {"strided": True, "dtype": torch.float64, "state": False},
            {"dtype": torch.bfloat16, "others": torch.float32, "lengths": (4, 0, 5), "raw": True},
        )
    ),
    replace(SMALL["gated_delta_rule"], raw=True, H=4, G=2),
    replace(SMALL["kda"], raw=True, bound=-5.0),
    replace(SMALL["rwkv7"], H=4, G=2, removed=4),
]


@pytest.fixture(autouse=True)
def _reset_compiler():
    torch.compiler.reset()


def operator_arguments(case, tensors):
    """Arguments of both passes."""
    return *(tensors.get(name) for name in DELTA.names), case.variant, *case.options


def leaves_of(case):
    return {name: x.requires_grad_() if x is not None and x.is_floating_point() else x for name, x in case.tensors().items()}


@pytest.mark.parametrize("case", every(2, CASES), ids=str)
def test_opcheck_forward(case):
    torch.library.opcheck(torch.ops.penstock.delta.default, (*operator_arguments(case, leaves_of(case)), "auto"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_backward(case):
    d_output, d_final_state = upstream(case)
    arguments = (d_output, d_final_state if case.state else None, *operator_arguments(case, case.tensors()), "auto")
    torch.library.opcheck(torch.ops.penstock.delta_backward.default, arguments)


@pytest.mark.parametrize("slots", [None, [5, -1]], ids=str)
@pytest.mark.parametrize("case", [*(replace(one, T=2, state=False) for one in SMALL.values()), Delta("kda", T=2, raw=True)], ids=str)
def test_opcheck_advance(case, slots):
    state = torch.randn(2 if slots is None else 6, case.H, case.K, case.V)
    given = case.tensors() | {"slots": None if slots is None else torch.tensor(slots), "state": state}
    options = case.scale, *case.flags.values()
    function = f"decode_step({case.variant!r})"
    torch.library.opcheck(torch.ops.penstock.delta_advance.default, (*(given[name] for name in ADVANCE.names), function, *options, "auto"))


def train(function, case):
    """Results and gradients of a function of the tensors of a case."""
    tensors = leaves_of(case)
    result = function(case, tensors, "auto")
    leaves = [x for x in tensors.values() if x is not None and x.requires_grad]
    grads = torch.autograd.grad(result, leaves, upstream(case))
    return [x.detach() for x in (*result, *grads)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_results_equal_eager_results(case):
    found = train(torch.compile(Delta.call, fullgraph=True, backend="aot_eager"), case)
    assert all(torch.equal(one, other) for one, other in zip(found, train(Delta.call, case), strict=True))


class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.logits = torch.nn.Linear(16, 4 * 16), torch.nn.Linear(16, 2)
        self.A_log, self.dt_bias = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, 8))

    def forward(self, x):
        q, k, v, g = self.project(x).unflatten(-1, (4, 2, 8)).unbind(-3)
        raw = {"A_log": self.A_log, "dt_bias": self.dt_bias, "use_qk_l2norm": True, "beta_logits": True}
        return ps.kda(q, k, v, g, self.logits(x), **raw).output.flatten(-2)


def test_exported():
    """The graph contains the operator and equals the module, also at other lengths."""
    module = Mixer()
    exported = torch.export.export(module, (torch.randn(2, 9, 16),), dynamic_shapes=({1: torch.export.Dim("T", min=2)},))
    assert "torch.ops.penstock.delta.default" in exported.graph_module.code
    for T in (9, 30):
        x = torch.randn(2, T, 16)
        torch.testing.assert_close(exported.module()(x), module(x))


@pytest.mark.parametrize("case", [*SMALL.values(), replace(SMALL["kda"], raw=True)], ids=str)
def test_autocast(case):
    """q, k, v, a and b are cast, as for a matrix product; gates, beta and states are not; gradients come back in float32."""
    tensors = leaves_of(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = case.call(tensors, "auto")
        found = torch.autograd.grad(result.output.float().sum(), [x for x in tensors.values() if x is not None])
    alike = ("q", "k", "v", "a", "b")
    wanted = case.call({name: x.bfloat16() if name in alike and x is not None else x for name, x in case.tensors().items()}, "auto")
    assert result.output.dtype == torch.bfloat16
    assert result.final_state.dtype == torch.float32
    assert torch.equal(result.output, wanted.output)
    assert torch.equal(result.final_state, wanted.final_state)
    assert {grad.dtype for grad in found} == {torch.float32}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", [*SMALL.values(), replace(SMALL["kda"], raw=True)], ids=str)
def test_no_grad_and_inference_mode(case, mode):
    wanted = case.call(case.tensors(), "auto")
    with mode():
        result = case.call(leaves_of(case), "auto")
        state = result.final_state.clone()
        one = replace(case, T=1)
        ps.decode_step(case.variant, **named(one, one.tensors() | {"initial_state": None}, "q", "g"), state=state)
    assert not result.output.requires_grad
    assert all(torch.equal(one, other) for one, other in zip(result, wanted))
    assert not torch.equal(state, wanted.final_state)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("fake", ["meta", "fake"])
def test_tensors_without_data(fake, raw):
    """Shapes and dtypes of results and gradients."""
    case = replace(SMALL["kda"], raw=raw, dtype=torch.bfloat16, others=torch.float32)
    tensors = case.tensors()
    if fake == "meta":
        given = {name: None if x is None else x.to("meta").requires_grad_() for name, x in tensors.items()}
        result = case.call(given, "auto")
    else:
        with FakeTensorMode() as mode:
            given = {name: None if x is None else mode.from_tensor(x).requires_grad_() for name, x in tensors.items()}
            result = case.call(given, "auto")
    for x, wanted in zip(result, case.call(tensors, "auto")):
        assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype)


def test_subsets_of_inputs():
    """Gradients of some inputs equal those of all."""
    case = replace(SMALL["kda"], raw=True)
    tensors = case.tensors()
    names = [name for name, x in tensors.items() if x is not None]

    def gradients(chosen):
        leaves = {name: tensors[name].detach().clone().requires_grad_() for name in chosen}
        result = case.call(tensors | leaves, "auto")
        return dict(zip(chosen, torch.autograd.grad(result, [*leaves.values()], upstream(case))))

    every_one = gradients(names)
    for name in names:
        assert torch.equal(gradients([name])[name], every_one[name]), name


@pytest.mark.parametrize("case", [*SMALL.values(), replace(SMALL["kda"], raw=True), replace(SMALL["rwkv7"], raw=True)], ids=str)
def test_compiled_decode_step_updates_the_pool(case):
    case = replace(case, T=1, state=False)
    states = [torch.ones(4, case.H, case.K, case.V) for _ in range(2)]
    given = named(case, case.tensors(), "q", "g") | {"slots": torch.tensor([3, 1])}
    compiled = torch.compile(ps.decode_step, fullgraph=True, backend="aot_eager")
    found, wanted = (f(case.variant, **given, state=s) for f, s in zip((compiled, ps.decode_step), states))
    assert torch.equal(found, wanted)
    assert torch.equal(*states)
    assert states[0][3].ne(1).any()
    assert states[0][2].eq(1).all()
