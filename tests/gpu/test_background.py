"""Kernels of the backward pass are compiled while the forward pass runs. They need no GPU."""

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from penstock.gpu import background, launch
from penstock.gpu.plan import Launch, Plan, Planned
from penstock.gpu.target import Target
from penstock.gpu.targets import TARGETS
from penstock.recurrence.triton import launch as passes
from penstock.recurrence.triton import plan as plans
from penstock.recurrence.triton.ahead import CONFIGURATIONS, HOPPER
from penstock.tune.ahead import jobs
from penstock.tune.passes import without_memory

TRAINED = [one for one in (*CONFIGURATIONS, *HOPPER) if one.passes != ("step",) and not one.packed]


class _Kernel:
    """Compiling waits until it is allowed."""

    def __init__(self, error=None):
        self.allowed, self.seen, self.error = threading.Event(), [], error

    def warmup(self, *arguments, grid, **options):
        self.allowed.wait(timeout=60)
        self.seen.append((threading.current_thread().name, arguments, options))
        if self.error is not None:
            raise self.error


def test_kernels_compile_in_other_threads_and_the_pass_waits_for_its_own():
    kernels = [_Kernel(), _Kernel(RuntimeError("no such target")), _Kernel()]
    plan = Plan(
        {"y": ((lambda sizes: sizes["T"], 3), torch.float16)},
        constants={"ones": (lambda count, device: torch.ones(count, device=device), 4)},
    )
    plan.launches += [Launch(one, 1, ("x", "y", "z", "ones"), (lambda sizes: sizes["T"],), (8,), (("num_warps", 2),)) for one in kernels]
    x = torch.zeros(6, 4)[::2]
    background.begin(plan, {"x": x, "z": None}, "x", {"T": 5}, None)
    for kernel in kernels[:2]:
        kernel.allowed.set()
        background.wait_for(kernel)  # an error is the pass's own
        ((name, (one, y, z, ones, T, constant), options),) = kernel.seen
        assert name.startswith("penstock-compile")
        for found in (one, z):
            assert (found.shape, found.stride(), found.device.type) == (x.shape, x.stride(), "meta")
        assert (y.shape, y.dtype, ones.shape, T, constant, options) == ((5, 3), torch.float16, (4,), 5, 8, {"num_warps": 2})
    assert not kernels[2].seen
    background.wait_for(_Kernel())
    kernels[2].allowed.set()
    background.wait_for(kernels[2])
    background.wait_for(kernels[2])
    assert len(kernels[2].seen) == 1


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_new_plan_on_a_gpu_names_the_pass_that_follows_once(monkeypatch, device):
    begun = []
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch, "Prepared", lambda plan, *_: SimpleNamespace(plan=plan, gpu=3))
    monkeypatch.setattr(launch, "Bound", lambda prepared, sizes: SimpleNamespace(run=lambda tensors: tensors))
    monkeypatch.setattr(background, "begin", lambda *given: begun.append(given))
    seen = SimpleNamespace(kind=SimpleNamespace(plans={}), bound={})
    p = SimpleNamespace(seen=seen, sizes={"T": 5}, operator=SimpleNamespace(names=("x",)), x=SimpleNamespace(device=torch.device(device)))
    made = Plan()
    for _ in range(3):
        launch.run("a pass", p, lambda _: Target("sm_90", 132, 1 << 17), lambda _: made, {}, later=lambda at, plan: ((at.arch, plan), {}))
        seen.bound.clear()
    assert begun == ([(("sm_90", made), {}, "x", {"T": 5}, 3)] if device == "cuda" else [])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("one", TRAINED, ids=lambda one: one.name)
def test_the_pass_that_follows_has_the_kernels_of_the_backward_pass(one, arch):
    """And arguments of the same types, for which Triton compiles."""
    target = TARGETS[arch]
    problem = without_memory(one.variant, one.shape, getattr(torch, one.dtype)).problem()
    forward = plans.chunk_forward_plan(problem, target, True)
    kept = forward.at(problem.sizes).memory.get("chunk_states")
    states = None if kept is None else torch.empty(kept[0], dtype=kept[1], device="meta")
    d_output = torch.empty_like(problem.v)
    wanted = plans.chunk_backward_plan(problem, d_output, None, target, states).at(problem.sizes)
    planned, tensors = passes._backward_to_come(problem, target, forward)
    found = planned.at(problem.sizes)
    given = {name: problem.q if x is None else x for name, x in tensors.items()}
    exact = {**given, "d_output": d_output, "states": problem.q if states is None else states}
    assert jobs(Planned(found, given), arch) == jobs(Planned(wanted, exact), arch)
    assert all(function(*rest, torch.device("meta")).device.type == "meta" for function, *rest in planned.constants.values())
    assert found.launches


def test_a_forward_pass_with_residuals_tells_what_follows(monkeypatch):
    told = []
    monkeypatch.setattr(launch, "run", lambda *given, later=None: told.append(later) or {"output": None, "final_state": None})
    problem = without_memory("gla", TRAINED[0].shape, torch.float32).problem()
    passes.chunk_forward(problem)
    passes.chunk_forward(problem, keep=True)
    assert told[0] is None
    assert told[1] is not None
