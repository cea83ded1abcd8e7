"""The kernels of the delta rule for Hopper compile for sm_90, without a GPU, in a process without Triton's interpreter."""

import os
import subprocess
import sys

import pytest

from penstock.gpu.hopper import without_gluon

pytestmark = pytest.mark.skipif(without_gluon() is not None, reason="the Gluon of this Triton does not fit the kernels")

FORWARD = """
import sys

import torch

from penstock.delta.operators import DELTA
from penstock.delta.triton import plan
from penstock.gpu.plan import Planned
from penstock.gpu.target import Target
from penstock.tune.ahead import jobs, resources

kind = getattr(torch, sys.argv[1])
H200 = Target("sm_90", 132, 232448)
for T, H, V, dtype, packed, state, keep in (
    (150, 2, 128, torch.float32, False, True, False), (64, 1, 64, kind, False, False, False),
    (70, 2, 128, torch.float32, True, True, False), (150, 2, 128, torch.float32, False, False, True)
):
    q, k, v = (torch.zeros(1, T, H, D, dtype=kind) for D in (128, 128, V))
    given = {"q": q, "k": k, "v": v, "g": torch.zeros(1, T, H, 128, dtype=dtype), "beta": torch.zeros(1, T, H)}
    given["initial_state"] = torch.zeros(2 if packed else 1, H, 128, V) if state else None
    given["cu_seqlens"] = torch.tensor([0, 5, T]) if packed else None
    problem = DELTA.checked("kda", [given.get(name) for name in DELTA.names], (None, True, False, False, False, None))
    tensors = {name: problem.q if x is None else x for name, x in zip(DELTA.names, problem.tensors)}
    for job in jobs(Planned(plan.chunk_forward_plan(problem, H200, keep).at(problem.sizes), tensors), "sm_90"):
        found = resources(job)
        print(found.spill, found.shared, job.kernel)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "most"), [("bfloat16", 8), ("float16", 72)])
def test_forward_kernels_compile_almost_without_spills(kind, most):
    """With residuals, too. 8 bytes are those of a walk without an initial state; 72 those of a walk that keeps residuals."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", FORWARD, kind], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.rpartition(".")[2] for line in lines] == ["penstock_kda_prepare_sm90", "penstock_kda_walk_sm90"] * 4
    for line in lines:
        spill, shared = map(int, line.split()[:2])
        assert spill <= most, line
        assert shared <= 232448, line


SCALAR = """
import torch

from penstock.delta.operators import DELTA
from penstock.delta.triton import plan
from penstock.gpu.plan import Planned
from penstock.gpu.target import Target
from penstock.tune.ahead import jobs, resources

for variant, D, programs, packed in (("gated_delta_rule", 128, 132, False), ("gated_delta_rule", 128, 2, True),
                                     ("delta_rule", 64, 132, False)):
    target = Target("sm_90", programs, 232448)
    q, k, v = (torch.zeros(1, 150, heads, D, dtype=torch.bfloat16) for heads in (1, 1, 2))
    given = {"q": q, "k": k, "v": v, "beta": torch.zeros(1, 150, 2), "cu_seqlens": torch.tensor([0, 5, 150]) if packed else None}
    given["g"] = torch.zeros(1, 150, 2) if variant == "gated_delta_rule" else None
    problem = DELTA.checked(variant, [given.get(name) for name in DELTA.names], (None, True, False, False, False, None))
    tensors = {name: problem.q if x is None else x for name, x in zip(DELTA.names, problem.tensors)} | {"d_output": v}
    forward = [plan.chunk_forward_plan(problem, target, keep) for keep in (False, True)]
    for made in (*forward, plan.chunk_backward_plan(problem, v, None, target)):
        for job in jobs(Planned(made.at(problem.sizes), tensors), "sm_90"):
            found = resources(job)
            print(found.spill, found.shared, job.kernel)
"""


@pytest.mark.timeout(600)
def test_kernels_without_decays_per_channel_compile_almost_without_spills():
    """With residuals, too. 128 bytes are addresses that a group of warps of ``gradients`` loads again for every head."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCALAR], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    names = [f"penstock_gdn_{name}_sm90" for name in ("prepare", "walk") * 3 + ("reverse", "gradients")]
    assert [line.rpartition(".")[2] for line in lines] == names * 3
    for line in lines:
        spill, shared = map(int, line.split()[:2])
        assert spill <= (128 if line.endswith("gradients_sm90") else 112), line
        assert shared <= 232448, line
