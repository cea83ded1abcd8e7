"""Kernels are compiled once, and those of the backward pass while the forward pass runs. They need no GPU."""

import threading
from concurrent.futures import ThreadPoolExecutor
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


def _launches(kernels, **more):
    fields = ("x", "y", "z", "ones"), (lambda sizes: sizes["T"],), (8,), (("num_warps", 2),)
    return [Launch(one, 1, *fields)._replace(**more) for one in kernels]


def _plan(kernels):
    plan = Plan(
        {"y": ((lambda sizes: sizes["T"], 3), torch.float16)},
        constants={"ones": (lambda count, device: torch.ones(count, device=device), 4)},
    )
    plan.launches += _launches(kernels)
    return plan


X = torch.zeros(6, 4)[::2]
GIVEN = {"x": X, "y": torch.empty(5, 3, dtype=torch.float16), "z": X, "ones": torch.ones(4)}


def _begin(kernels):
    background.begin(_plan(kernels), {"x": X, "z": None}, "x", {"T": 5}, None)


def _compiled(kernel, **more):
    (one,) = _launches([kernel], numbers=(5,), **more)
    return background.compiled(one, GIVEN, None)


@pytest.fixture
def two_threads(monkeypatch):
    pool = ThreadPoolExecutor(2, "penstock-compile")
    monkeypatch.setattr(background, "_pool", lambda: pool)
    yield
    pool.shutdown()
    assert not background._running


def test_kernels_compile_in_other_threads_and_the_pass_waits_for_its_own(two_threads):
    kernels = [_Kernel(), _Kernel(RuntimeError("no such target"))]
    _begin(kernels)
    for kernel in kernels:
        kernel.allowed.set()
        if kernel.error is None:
            _compiled(kernel)
        else:
            with pytest.raises(RuntimeError, match="no such target"):
                _compiled(kernel)
        (name, (one, y, z, ones, T, constant), options), (own, _, _) = kernel.seen
        assert name.startswith("penstock-compile")
        assert own == threading.current_thread().name
        for found in (one, z):
            assert (found.shape, found.stride(), found.device.type) == (X.shape, X.stride(), "meta")
        assert (y.shape, y.dtype, ones.shape, T, constant, options) == ((5, 3), torch.float16, (4,), 5, 8, {"num_warps": 2})
        assert {y.device.type, ones.device.type} == {"meta"}


def test_the_pass_takes_what_is_queued_and_waits_for_no_other_launch_of_its_kernel(two_threads):
    busy, kernel = [_Kernel(), _Kernel()], _Kernel()
    _begin([*busy, kernel])
    kernel.allowed.set()
    _compiled(kernel)
    assert [name for name, *_ in kernel.seen] == [threading.current_thread().name]
    keys = [background._key(one._replace(numbers=(5,)), GIVEN, None) for one in _launches(busy)]
    assert set(keys) == set(background._running)
    for more in ({"constants": (9,)}, {"numbers": (6,)}, {"options": (("num_warps", 4),)}):
        (one,) = _launches(busy[:1], **{"numbers": (5,), **more})
        assert background._key(one, GIVEN, None) not in background._running
    for one in busy:
        one.allowed.set()


def test_what_another_thread_compiles_is_not_compiled_in_the_background(two_threads):
    kernel = _Kernel()
    with ThreadPoolExecutor(1, "a pass") as one:
        future = one.submit(_compiled, kernel)
        while not background._running:
            assert not future.done()
        _begin([kernel])
        kernel.allowed.set()
    assert [name[:6] for name, *_ in kernel.seen] == ["a pass"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_new_plan_on_a_gpu_names_the_passes_that_follow_once(monkeypatch, device):
    """The one beside it before its own kernels are compiled, those later when all of these but one are."""
    begun = []
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch, "Prepared", lambda plan, *_: SimpleNamespace(plan=plan, gpu=3, later=None))

    def bound(prepared, sizes):
        begun.append("own")
        later, prepared.later = prepared.later, None
        if later is not None:
            later()
        return SimpleNamespace(run=lambda tensors: tensors)

    monkeypatch.setattr(launch, "Bound", bound)
    monkeypatch.setattr(background, "begin", lambda *given: begun.append(given))
    seen = SimpleNamespace(kind=SimpleNamespace(plans={}), bound={})
    p = SimpleNamespace(seen=seen, sizes={"T": 5}, operator=SimpleNamespace(names=("x",)), x=SimpleNamespace(device=torch.device(device)))
    made, beside = Plan(), Plan()
    for _ in range(2):
        launch.run(
            "a pass", p, lambda _: Target("sm_90", 132, 1 << 17), lambda _: made, {},
            beside=lambda at: (beside, {"arch": at.arch}), later=[lambda at, plan: ((at.arch, plan), {})],
        )  # fmt: skip
        seen.bound.clear()
    ahead, after = (beside, {"arch": "sm_90"}, "x", {"T": 5}, 3), (("sm_90", made), {}, "x", {"T": 5}, 3)
    assert begun == ([ahead, "own", after, "own"] if device == "cuda" else ["own", "own"])


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
    monkeypatch.setattr(launch, "run", lambda *given, later=(): told.append(later) or {"output": None, "final_state": None})
    problem = without_memory("gla", TRAINED[0].shape, torch.float32).problem()
    passes.chunk_forward(problem)
    passes.chunk_forward(problem, keep=True)
    assert [len(one) for one in told] == [0, 1]
