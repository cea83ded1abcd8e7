"""Which calls the softmax kernels for Hopper are planned for. Plans need no GPU."""

import pytest
import torch

from penstock.gpu.hopper import without_gluon
from penstock.gpu.target import Target
from penstock.softmax.operators import ATTENTION
from penstock.softmax.triton import plan
from penstock.softmax.triton.sm90 import forms

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
H200 = Target("sm_90", 132, 232448)
HOPPER = {
    "forward": ["penstock_attention_fwd_sm90"],
    "backward": ["penstock_attention_bwd_dq_sm90", "penstock_attention_bwd_dkdv_sm90"],
}
PLAIN = {
    "forward": ["penstock_attention_fwd"],
    "backward": ["penstock_attention_delta", "penstock_attention_bwd_dkdv", "penstock_attention_bwd_dq"],
}
"""Kernels that are launched."""

pytestmark = pytest.mark.skipif(without_gluon() is not None, reason="the Gluon of this Triton does not fit the kernels")


def attention(q, k, v, offsets=None, causal=True, scale=0.1, window=None):
    return ATTENTION.checked("softmax_attention", (q, k, v, offsets, offsets), (causal, scale, window, False))


def call(B=2, Tq=300, Tk=300, H=4, G=2, D=64, dtype=BFLOAT16, offsets=None, **options):
    q, k, v = (torch.empty(B, T, heads, D, dtype=dtype, device="meta") for T, heads in ((Tq, H), (Tk, G), (Tk, G)))
    return attention(q, k, v, offsets, **options)


def kernels_of(made):
    return [launch.kernel.fn.__name__ for launch in made.launches]


def forward(a, target=H200):
    return kernels_of(plan.forward_plan(a, target))


def backward(a, d_output=None, target=H200):
    return kernels_of(plan.backward_plan(a, a.q if d_output is None else d_output, None, target))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_calls_in_16_bits_take_hopper_kernels(D, dtype):
    for options in ({}, {"causal": False}, {"window": 40}, {"offsets": torch.empty(5, dtype=torch.int64, device="meta"), "B": 1}):
        a = call(D=D, dtype=dtype, **options)
        assert forward(a) == HOPPER["forward"]
        assert backward(a) == HOPPER["backward"]


def test_heads_of_256_have_a_forward_kernel():
    assert forward(call(D=256)) == HOPPER["forward"]
    assert backward(call(D=256)) == PLAIN["backward"]


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
def test_other_calls_take_the_plain_kernels(a, target):
    assert forward(a, target) == PLAIN["forward"]
    assert backward(a, target=target) == PLAIN["backward"]


def test_tensors_must_be_rows_of_a_matrix():
    a, wide = call(H=2, G=2), torch.empty(2, 300, 3, 2, 64, dtype=BFLOAT16, device="meta")
    q, k, v = wide.unbind(2)
    assert forward(attention(q, k, v)) == HOPPER["forward"]
    turned = torch.empty(2, 2, 300, 64, dtype=BFLOAT16, device="meta").transpose(1, 2)
    assert forward(attention(a.q, turned, a.v)) == PLAIN["forward"]
    assert backward(a, turned) == PLAIN["backward"]
    assert backward(a, torch.empty(1, dtype=BFLOAT16, device="meta").expand(a.q.shape)) == PLAIN["backward"]


@pytest.mark.parametrize("shape", [*forms.FORWARD.values(), *forms.BY_QUERIES.values(), *forms.BY_KEYS.values()], ids=str)
def test_registers_fit_the_hardware(shape):
    threads = (shape.groups + 1) * 128
    assert shape.programs * threads * shape.registers_before <= forms.REGISTERS
    assert shape.programs * (shape.groups * 128 * shape.registers + 128 * 24) <= forms.REGISTERS
    assert shape.registers % 8 == shape.registers_before % 8 == 0
    assert shape.registers <= 255


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (32, 4)], ids=str)
@pytest.mark.parametrize("T", [1, 4096, 1 << 19])
def test_heads_that_run_together_fit_the_cache(T, heads):
    H, G = heads
    a = call(B=3, Tq=T, Tk=T, H=H, G=G, D=128)
    (made,) = plan.forward_plan(a, H200).at(a.sizes).launches
    together = made.numbers[made.kernel.arg_names.index("together") - len(made.tensors)]
    assert 1 <= together <= 3 * H
    assert together * -(-T // 128) <= made.grid < 1 << 31
    held = max(1, together // (H // G)) * 2 * 2 * T * 128
    assert held <= forms.L2 // 2 or together == H // G


@pytest.mark.parametrize("B", [1, 2])
def test_calls_that_share_plans_have_equal_plans(B):
    """Slices in time have equal strides. Only those of one row and whole tensors are matrices, which the Hopper kernels need."""
    whole = call(B=B, Tq=128, Tk=128)
    problems = [attention(*(x[:, :T] for x in (whole.q, whole.k, whole.v))) for T in (128, 100, 65)]
    assert forward(problems[0]) == HOPPER["forward"]
    for one in problems:
        for other in problems:
            if one.seen.kind is other.seen.kind:
                assert plan.forward_plan(one, H200).at(other.sizes) == plan.forward_plan(other, H200).at(other.sizes)
    assert len({id(one.seen.kind) for one in problems}) == B
