"""The backward kernel for heads that share q and k: its gradients against the oracle, and when plans use it."""

from dataclasses import replace

import pytest
import torch
from cases import Case
from contract import check_contract, problem_of, run
from sampling import every

from penstock.gpu.launch import trying
from penstock.gpu.target import Target
from penstock.recurrence.triton import plan
from penstock.recurrence.triton.forms import groups
from penstock.tokens.shape import Shape
from penstock.tune.passes import planned, without_memory

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
"""NumPy's, under Triton's interpreter."""

IMPL = "triton_chunkwise"
KERNEL = "penstock_chunk_bwd_groups"
H200 = Target("sm_90", 132, 227 << 10)
VARIANTS = ("linear_attention", "retention", "simple_gla")
OF = Case("simple_gla", B=1, T=135, H=4, G=2, K=16, V=16)
"""Two whole chunks, and a shorter one."""
PACKED = (80, 0, 3, 140, 64, 65)


def cases(variant):
    of = replace(OF, variant=variant)
    found = [of, replace(of, H=6, G=1, T=128, B=2), replace(of, H=8, G=4, state=False), replace(of, reverse=True, K=24, V=40)]
    found += [replace(of, lengths=PACKED, G=1), replace(of, lengths=PACKED, reverse=True, H=3, G=1), replace(of, strided=True, scale=0.3)]
    found += [replace(of, shared=axes, T=70) for axes in ("T", "H", "overlap")]
    found += [replace(of, dtype=torch.float16, K=128, V=64, T=70, G=1), replace(of, dtype=torch.float16, others=torch.float32, H=2, G=1)]
    if variant != "linear_attention":
        found += [replace(of, gate=gate, T=70) for gate in ("-inf", "weak", -30.0, 0.0, -torch.inf)]
    if variant == "simple_gla":
        found += [replace(of, gate=gate) for gate in ("mixture", "spikes", "uneven", "drift", "-1e4")]
    return found


@pytest.fixture
def ran():
    """The forms that run."""
    with trying({}) as ran:
        yield ran


@pytest.mark.parametrize("case", every(4, [case for variant in VARIANTS for case in cases(variant)]), ids=str)
def test_gradients(case):
    assert uses_the_kernel(case)
    check_contract(case, IMPL)


def uses_the_kernel(case):
    """Whether the interpreter's plan for a case has the kernel."""
    return names(interpreted(case))[-1] == KERNEL


def interpreted(case):
    """The interpreter's plan for a case."""
    problem = problem_of(case, case.tensors()).whole
    return plan.chunk_backward_plan(problem, torch.empty_like(problem.v), None, Target("interpreter", 4, 1 << 20))


def names(made):
    return [one.kernel.fn.__name__ for one in made.launches]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("T", [65, 128])
def test_heads_of_a_group_in_parts(variant, T):
    """Two chunks on four multiprocessors: two programs share the heads of a group, and their float32 gradients are summed."""
    case = Case(variant, B=1, T=T, H=12, G=1, K=8, V=8, dtype=torch.float16)
    check_contract(case, IMPL)
    made = interpreted(case)
    assert names(made)[-1] == KERNEL
    assert made.memory["dq"][0][2] == 2
    assert made.memory["dq"][1] == torch.float32


def test_gradients_without_that_of_the_decay(ran):
    tensors = OF.tensors()
    wanted = run(OF, tensors, OF.upstream(), IMPL)
    leaves = {name: tensors[name].requires_grad_() for name in ("q", "k", "v", "initial_state")}
    output, final = OF.call(tensors | leaves, IMPL)
    found = torch.autograd.grad((output, final), tuple(leaves.values()), OF.upstream())
    for name, x in zip(leaves, found):
        torch.testing.assert_close(x, wanted[f"d{name}"], rtol=0, atol=0)
    assert groups.BACKWARD.name in ran


def test_gradients_of_the_output_alone():
    """The final state has no gradient, and there is no initial state."""
    case = replace(OF, state=False)
    tensors, (d_output, d_final) = case.tensors(), case.upstream()
    wanted = run(case, tensors, (d_output, torch.zeros_like(d_final)), IMPL)
    leaves = {name: tensors[name].detach().requires_grad_() for name in ("q", "k", "v", "g")}
    found = torch.autograd.grad(case.call(tensors | leaves, IMPL)[0], tuple(leaves.values()), d_output)
    for name, x in zip(leaves, found):
        torch.testing.assert_close(x, wanted[f"d{name}"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_groups_share_nothing(value):
    """NaN and inf in the heads of one group change no bit of the gradients of the other."""
    healthy = OF.tensors()
    sick = {name: None if x is None else x.clone() for name, x in healthy.items()}
    sick["k"][:, 3, 0], sick["v"][:, 5, :2] = value, value
    found, wanted = (run(OF, x, OF.upstream(), IMPL) for x in (sick, healthy))
    for name in ("dq", "dk"):
        assert torch.equal(found[name][:, :, 1], wanted[name][:, :, 1]), name
    for name in ("dv", "dg"):
        assert torch.equal(found[name][:, :, 2:], wanted[name][:, :, 2:]), name


def test_gradients_equal_sums_of_those_of_copies():
    """Gradients of one group are the sums of those of copies for every head."""
    case = replace(OF, H=4, G=1)
    tensors = case.tensors()
    grouped = run(case, tensors, case.upstream(), IMPL)
    copies = tensors | {name: tensors[name].expand(-1, -1, 4, -1).contiguous() for name in ("q", "k")}
    every = run(replace(case, G=0), copies, case.upstream(), IMPL)
    for name in ("dq", "dk"):
        torch.testing.assert_close(grouped[name], every[name].sum(2, keepdim=True), rtol=1e-5, atol=1e-4)
    for name in ("dv", "dg", "dinitial_state"):
        torch.testing.assert_close(grouped[name], every[name], rtol=1e-5, atol=1e-4)


def on_hopper(variant, shape, G, target=H200, dtype=torch.bfloat16):
    """The plan of a backward pass."""
    return planned("backward", without_memory(variant, Shape(*shape), dtype, G), target).plan


@pytest.mark.parametrize(
    ("shape", "G", "heads"),
    [
        ((2, 4096, 80, 128, 64), 1, 80), ((2, 4096, 80, 128, 64), 8, 10), ((1, 4096, 80, 128, 64), 1, 40),
        ((1, 1024, 64, 128, 64), 1, 8), ((1, 1024, 64, 128, 64), 8, 8), ((8, 2048, 40, 128, 64), 1, 40), ((4, 300, 6, 64, 32), 2, 3),
    ],
)  # fmt: skip
def test_heads_of_a_program(shape, G, heads):
    """As many parts of each group as chunks leave multiprocessors for; numbers of tokens and sequences count as powers of two."""
    made = on_hopper("simple_gla", shape, G)
    last, (B, T, H, K, V) = made.launches[-1], shape
    assert names(made)[-1] == KERNEL
    assert last.constants[0] == heads
    assert made.memory["dq"] == made.memory["dk"] == ((B, T, H // heads, K), torch.bfloat16 if heads * G == H else torch.float32)
    assert made.memory["dv"] == ((B, T, H, V), torch.bfloat16)
    assert "d_chunk_states" in made.memory


@pytest.mark.parametrize(
    ("variant", "shape", "G", "more"),
    [
        ("simple_gla", (2, 4096, 80, 128, 64), 80, {}),
        ("simple_gla", (2, 4096, 80, 256, 64), 1, {}),
        ("simple_gla", (2, 4096, 80, 128, 128), 1, {}),
        ("simple_gla", (2, 64, 80, 128, 64), 1, {}),
        ("simple_gla", (2, 4096, 80, 128, 64), 1, {"dtype": torch.float16}),
        ("simple_gla", (2, 4096, 80, 128, 64), 1, {"target": Target("sm_80", 108, 163 << 10)}),
        ("simple_gla", (2, 4096, 80, 128, 64), 1, {"target": H200._replace(shared_memory=99 << 10)}),
        ("gla", (2, 4096, 16, 128, 64), 1, {}),
        ("rwkv5", (2, 4096, 16, 64, 64), 1, {}),
    ],
)
def test_where_the_kernel_is_not_used(variant, shape, G, more):
    made = on_hopper(variant, shape, G, **more)
    assert KERNEL not in names(made)
    assert made.memory["dq"][0] == (*shape[:3], shape[3])


def test_states_of_the_forward_pass_are_used():
    """On Hopper a walk stores them; the backward pass then launches the gradients of states and the kernel."""
    problem = without_memory("simple_gla", Shape(2, 4096, 80, 128, 64), torch.bfloat16, 1).problem().whole
    forward = plan.chunk_forward_plan(problem, H200, keep=True).at(problem.sizes)
    shape, dtype = forward.memory["chunk_states"]
    assert (shape, dtype) == ((128, 80, 128, 64), torch.bfloat16)
    states = torch.empty(shape, dtype=dtype, device="meta")
    made = plan.chunk_backward_plan(problem, torch.empty_like(problem.v), None, H200, states)
    assert names(made)[-1] == KERNEL
    assert "chunk_states" not in made.memory
    assert "states" in made.launches[-1].tensors
