"""The Gluon kernels of softmax attention for Hopper, emulated on a CPU, against the oracle."""

from dataclasses import replace

import pytest
import torch
from attention import Attention
from contract import problem_of

pytest.importorskip("triton")
from emulated import gluon

from penstock.gpu.hopper import without_gluon
from penstock.gpu.plan import dense
from penstock.gpu.target import Target
from penstock.softmax.triton import plan

H200 = Target("sm_90", 132, 232448)
pytestmark = pytest.mark.skipif(without_gluon() is not None, reason="the Gluon of this Triton does not fit the kernels")

OF = Attention(B=1, Tq=150, Tk=150, D=64, dtype=torch.bfloat16)
CASES = [
    OF,
    replace(OF, D=128, H=4, G=2),
    replace(OF, D=128, dtype=torch.float16, causal=False),
    replace(OF, causal=False, Tq=70),
    replace(OF, Tq=65, Tk=300),
    replace(OF, Tq=300, Tk=65),
    replace(OF, Tq=1, Tk=1),
    replace(OF, Tq=300, Tk=300, H=1, window=40),
    replace(OF, lengths=((3, 70), (0, 5), (130, 130), (5, 0), (64, 64))),
    replace(OF, lengths=((70, 70), (130, 130)), D=128, window=33),
    replace(OF, large=100.0),
]


def run(case, seed=0):
    """Results and gradients by the emulated kernels."""
    tensors, (d_output, d_lse) = case.tensors(), case.upstream()
    a = problem_of(case, tensors)
    given = {"q": a.q, "k": a.k, "v": a.v, "cu_seqlens": dense(a.cu_seqlens), "cu_seqlens_k": dense(a.key_offsets)}
    given = {name: a.q if x is None else x for name, x in given.items()}
    found = gluon.run(plan.forward_plan(a, H200), dict(given), a.sizes, seed)
    results = {name: found[name] for name in ("output", "lse")}
    backward = plan.backward_plan(a, d_output, d_lse, H200)
    found = gluon.run(backward, given | results | {"d_output": d_output, "d_lse": d_lse}, a.sizes, seed)
    assert all("sm90" in one.kernel.fn.__name__ for one in backward.launches)
    return results | {name: found[name] for name in ("dq", "dk", "dv")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_the_oracle(case):
    case.check(run(case), "triton")


def test_heads_of_256():
    """Forward: the backward pass has no kernel for them."""
    case = replace(OF, D=256)
    a = problem_of(case, case.tensors())
    given = {"q": a.q, "k": a.k, "v": a.v, "cu_seqlens": a.q, "cu_seqlens_k": a.q}
    found = gluon.run(plan.forward_plan(a, H200), given, a.sizes)
    case.check({name: found[name] for name in ("output", "lse")}, "triton")


def test_bits_do_not_depend_on_the_order_of_warps():
    case = replace(OF, H=1, D=128)
    first = run(case)
    for seed in (1, 2):
        for name, x in run(case, seed).items():
            assert torch.equal(x, first[name]), name
