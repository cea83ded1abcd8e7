"""Segments of long sequences side by side, under the interpreter (on a GPU: compiled): M S + L of each, and the states before them."""

from dataclasses import replace

import pytest
import torch
from contract import check_results, problem_of
from deltas import Delta
from sampling import slow

from penstock.delta.triton.calls import Backward, Forward
from penstock.delta.triton.forms import chunks, lists, segments
from penstock.delta.triton.portable import walk, walk_backward
from penstock.gpu import launch
from penstock.gpu.forms import first
from penstock.gpu.target import Target

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
FORMS = ("delta_segments", "delta_segments_bwd")
OF = Delta("kda", B=1, T=150, H=1, K=4, V=5)
CASES = [
    replace(OF, lengths=(0, 70, 1, 0)),
    replace(OF, variant="rwkv7", T=65),
    replace(OF, variant="gated_delta_rule", T=66, K=136),
    *slow(
        replace(OF, lengths=(0, 70, 130), K=256, V=40),
        OF,
        replace(OF, lengths=(0, 70, 1, 0, 130)),
        replace(OF, variant="rwkv7", B=2, T=66),
        replace(OF, gate="mixture", state=False),
        replace(OF, variant="delta_rule", H=2, G=1),
        replace(OF, variant="gated_delta_rule", gate="spikes"),
        replace(OF, variant="dplr", lengths=(64, 128, 0)),
        replace(OF, T=130, key="equal", beta=2.0),
        replace(OF, T=70, raw=True, dtype=torch.float16),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_segments_equal_the_oracle(case):
    """Segments of one chunk."""
    with launch.trying({}, *FORMS) as planned:
        check_results(case, "triton_chunkwise")
    assert planned.issuperset(FORMS)


H100 = Target("sm_90", 132, 232448)


def call_of(T, H, B):
    """A call with these sizes, whose tensors are smaller. Hopper has no other kernels for heads of 120."""
    case = Delta("gated_delta_rule", B=1, T=1, H=1, K=128, V=120, dtype=torch.float16)
    p = problem_of(case, case.tensors())
    p.sizes = p.sizes | {"B": B, "N": B, "T": T, "H": H, "G": H, "J": H}
    return Forward.of(p, H100)


SIZES = [
    (65536, 4, 1, 4096), (65536, 8, 1, 8192), (4096, 4, 1, 256), (512, 4, 1, 256), (256, 4, 1, None), (65536, 16, 1, None),
    (65536, 4, 4, None),
]  # fmt: skip


@pytest.mark.parametrize(("T", "H", "B", "L"), SIZES)
def test_few_programs_are_cut_into_segments(T, H, B, L):
    """The rule, and the form that a call takes by it."""
    call = call_of(T, H, B)
    segment = segments.of_programs(call)
    assert (None if segment is None else segment({"B": B, "T": T, "N": B})) == L
    assert first(lists.CHUNK_FORWARD, call) is (chunks.FORWARD if L is None else segments.FORWARD)


def test_the_gradient_of_the_state_alone_needs_no_states():
    case = replace(OF, T=70)
    p, (d_output, d_final) = problem_of(case, case.tensors()), case.upstream()
    for form, alone, wanted in ((chunks.BACKWARD, 0, 1), (segments.BACKWARD, 1, 3)):
        for state_alone, walks in ((True, alone), (False, wanted)):
            call = Backward.of(p, Target.of(d_output.device), d_output=d_output, d_final_state=d_final, state_alone=state_alone)
            kernels = [one.kernel for one in form.plan(call).launches]
            assert kernels.count(walk.penstock_delta_walk) == walks
            assert kernels.count(walk_backward.penstock_delta_walk_bwd) == (1 if state_alone else (wanted + 1) // 2)
