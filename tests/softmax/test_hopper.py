"""Where the softmax kernels for Hopper are planned, and where the plain ones stand in: plans need no GPU."""

import pytest
import torch
from penstock.softmax.problem import Attention

from penstock.gpu.target import Target
from penstock.softmax.triton import hopper, plan

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
H200 = Target("sm_90", 132, 232448)

pytestmark = pytest.mark.skipif(hopper.kernels() is None, reason="this Triton has no Gluon as the kernels are written in")


def call(B=2, Tq=300, Tk=300, H=4, G=2, D=64, dtype=BFLOAT16, scale=0.1, offsets=None, **options):
    q, k, v = (torch.empty(B, T, heads, D, dtype=dtype, device="meta") for T, heads in ((Tq, H), (Tk, G), (Tk, G)))
    return Attention(q, k, v, offsets, offsets, options.get("causal", True), scale, options.get("window"))


def kernels_of(made):
    return [f"{launch.kernel.fn.__module__.rpartition('.')[2]}.{launch.kernel.fn.__name__}" for launch in made.launches]


def forward(a, target=H200):
    return kernels_of(plan.forward_plan(a, target))


def backward(a, d_output=None, target=H200):
    return kernels_of(plan.backward_plan(a, a.q if d_output is None else d_output, None, target))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_they_take_calls_in_16_bits(D, dtype):
    for options in ({}, {"causal": False}, {"window": 40}, {"offsets": torch.empty(5, dtype=torch.int64, device="meta"), "B": 1}):
        a = call(D=D, dtype=dtype, **options)
        assert forward(a) == ["hopper_forward.forward"]
        assert backward(a) == ["hopper_backward.by_queries", "hopper_backward.by_keys"]


def test_heads_of_256_have_a_forward_kernel():
    assert forward(call(D=256)) == ["hopper_forward.forward"]
    assert backward(call(D=256)) == ["backward.deltas", "backward.by_keys", "backward.by_queries"]


@pytest.mark.parametrize(
    ("a", "target"),
    [
        (call(), H200._replace(arch="sm_80")),
        (call(), H200._replace(arch="sm_100")),
        (call(dtype=FLOAT32), H200),
        (call(D=80), H200),
        (call(scale=-1.0), H200),
        (call(Tk=0), H200),
    ],
    ids=["sm_80", "sm_100", "float32", "odd D", "a scale below 0", "no keys"],
)
def test_what_they_do_not_take_the_plain_ones_do(a, target):
    assert forward(a, target) == ["forward.forward"]
    assert backward(a, target=target) == ["backward.deltas", "backward.by_keys", "backward.by_queries"]


def test_rows_of_a_wider_matrix_are_taken_and_other_strides_are_left_to_the_plain_ones():
    a, wide = call(H=2, G=2), torch.empty(2, 300, 3, 2, 64, dtype=BFLOAT16, device="meta")
    q, k, v = wide.unbind(2)
    assert forward(Attention(q, k, v, None, None, True, 0.1, None)) == ["hopper_forward.forward"]
    turned = torch.empty(2, 2, 300, 64, dtype=BFLOAT16, device="meta").transpose(1, 2)
    assert forward(Attention(a.q, turned, a.v, None, None, True, 0.1, None)) == ["forward.forward"]
    assert backward(a, turned) == ["backward.deltas", "backward.by_keys", "backward.by_queries"]
    assert backward(a, torch.empty(1, dtype=BFLOAT16, device="meta").expand(a.q.shape))[0] == "backward.deltas"


@pytest.mark.parametrize("shape", [*hopper.FORWARD.values(), *hopper.BY_QUERIES.values(), *hopper.BY_KEYS.values()], ids=str)
def test_registers_are_divided_as_the_hardware_has_them(shape):
    threads = (shape.groups + 1) * 128
    assert shape.programs * threads * shape.registers_before <= hopper.REGISTERS
    assert shape.programs * (shape.groups * 128 * shape.registers + 128 * 24) <= hopper.REGISTERS
    assert shape.registers % 8 == shape.registers_before % 8 == 0
    assert shape.registers <= 255


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (32, 4)], ids=str)
@pytest.mark.parametrize("T", [1, 4096, 1 << 19])
def test_heads_go_together_as_the_cache_holds_them(T, heads):
    H, G = heads
    a = call(B=3, Tq=T, Tk=T, H=H, G=G, D=128)
    (made,) = plan.forward_plan(a, H200).launches
    together = made.numbers[made.kernel.arg_names.index("together") - len(made.tensors)]
    assert 1 <= together <= 3 * H
    assert together * -(-T // 128) <= made.grid < 1 << 31
    held = max(1, together // (H // G)) * 2 * 2 * T * 128
    assert held <= hopper.L2 // 2 or together == H // G
