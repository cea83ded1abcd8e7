"""How launches reach Triton. They need no GPU."""

import ast
import importlib
import inspect
import re
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from penstock.call import private, versions  # noqa: E402
from penstock.gpu import direct, launch  # noqa: E402
from penstock.gpu.plan import Launch, Plan  # noqa: E402
from penstock.gpu.target import Target  # noqa: E402


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_tools_are_noticed(hook):
    def watch(metadata):
        raise AssertionError

    before = getattr(triton.knobs.runtime, hook)
    assert not direct.hooked()
    if hasattr(before, "add"):
        before.add(watch)
        assert direct.hooked()
        before.remove(watch)
    assert not direct.hooked()
    setattr(triton.knobs.runtime, hook, watch)
    assert direct.hooked()
    setattr(triton.knobs.runtime, hook, before)
    assert not direct.hooked()


@pytest.mark.skipif(not direct.KNOWN, reason="this Triton's launches go through its runner")
def test_triton_runs_compiled_kernels_as_launches_do():
    """direct.Launcher calls a kernel's ``run`` with the arguments that Triton's runner passes."""
    runner = inspect.getsource(triton.compiler.CompiledKernel.__getitem__).split()
    passed = "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, launch_metadata,"
    assert passed in " ".join(runner)


@pytest.mark.parametrize(("text", "known"), [("3.4.0", False), ("3.6.0", True), ("3.7.1", True), ("3.9.0", False), ("3.10.0", False)])
def test_only_launchers_that_are_known_are_passed_by(monkeypatch, text, known):
    with monkeypatch.context() as patch:
        patch.setattr(triton, "__version__", text)
        versions.checked.cache_clear()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            importlib.reload(direct)
            importlib.reload(direct)
        assert direct.KNOWN is known
        assert len(warned) == (text == "3.10.0")
    versions.checked.cache_clear()
    importlib.reload(direct)


class _Kernel:
    function, packed_metadata = 11, (4, 1, 0)

    def __init__(self):
        self.launches = []

    def run(self, *arguments):
        self.launches.append(("run", *arguments))

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, *arguments))


@pytest.mark.parametrize(("known", "hooked"), [(True, False), (False, False), (True, True)])
def test_unknown_versions_and_hooked_launches_go_through_tritons_runner(monkeypatch, known, hooked):
    monkeypatch.setattr(direct, "hooked", lambda: hooked)
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch.private, "raw_stream", lambda gpu: 13)
    monkeypatch.setattr(launch.private, "current_device", lambda: 0)
    kernel, x = _Kernel(), torch.ones(2)
    plan = Plan(launches=[Launch(None, lambda sizes: sizes["T"], ("x", "y"), (7,), (8,), ())])
    prepared = launch.Prepared(plan, x.device, ["y"], "x")
    prepared.gpu, prepared.kernels, prepared.raw, prepared.tiled = 0, (kernel,), [direct.raw(kernel, False)] if known else [], [[]]
    launch.Bound(prepared, {"T": 5}).run({"x": x})
    arguments = x.data_ptr(), x.data_ptr(), 7, 8
    past = "run", 5, 1, 1, 13, 11, (4, 1, 0), None, None, None, *arguments
    assert kernel.launches == [past if known and not hooked else ((5, 1, 1), *arguments)]


def test_descriptors_are_encoded_once_per_address(monkeypatch):
    encoded = []
    monkeypatch.setattr(direct, "_encode", lambda x, known, layout: encoded.append(x.data_ptr()) or [known, layout, x.data_ptr()])
    kernel, x = _Kernel(), torch.ones(direct.KEPT + 2)
    kernel.metadata = SimpleNamespace(tensordesc_meta=["layout of x"])
    launcher = direct.Launcher(kernel, direct.raw(kernel, False), [("x", "known of x")])
    for at in (0, 0, 1, 0):
        launcher(5, 13, {"x": x[at:]}, (7,))
        assert kernel.launches[-1][10:] == ("known of x", "layout of x", x[at:].data_ptr(), 7)
    assert encoded == [x[at:].data_ptr() for at in (0, 1)]
    for at in range(direct.KEPT + 1):
        launcher(5, 13, {"x": x[at:]}, ())
    assert len(launcher.encoded[0][1]) == 1


@pytest.mark.parametrize(("version", "scratch", "inner"), [((3, 6), 0, True), ((3, 6), 8, False), ((3, 7), 0, False)])
def test_cuda_launchers_of_triton_3_6_are_passed_by_unless_kernels_need_scratch_memory(monkeypatch, version, scratch, inner):
    class CudaLauncher:
        launch_cooperative_grid, launch_pdl, global_scratch_size, profile_scratch_size = False, True, 0, scratch
        launch = "the compiled launcher"

    monkeypatch.setattr(direct, "VERSION", version)
    kernel = SimpleNamespace(run=CudaLauncher(), function=11, packed_metadata=(4, 1, 0))
    passed_by = "the compiled launcher", (11, False, True, None, None, (4, 1, 0), None, None, None)
    assert direct.raw(kernel, False) == (passed_by if inner else (kernel.run, (11, (4, 1, 0), None, None, None)))


def test_constants_are_cached_for_each_stream():
    """Another stream does not wait for the values."""

    def made(count, device):
        return torch.ones(count, device=device)

    device = torch.device("cpu")
    first = launch._constant((made, 16), device, 1)
    assert launch._constant((made, 16), device, 1) is first
    assert launch._constant((made, 16), device, 2) is not first
    assert first.shape == (16,)


class _Compiled:
    """A kernel for ``Prepared``: compiling takes until all others have begun."""

    arg_names = ("x",)

    def __init__(self, barrier):
        self.barrier, self.threads = barrier, []

    def warmup(self, *arguments, grid, **options):
        self.barrier.wait(timeout=60)
        self.threads.append(threading.get_ident())
        return self


def test_kernels_of_a_plan_and_their_launchers_are_made_side_by_side(monkeypatch):
    """Triton compiles a launcher in C when a kernel is loaded, so that belongs to the parallel part."""
    made, x = [], torch.ones(2)
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(direct, "KNOWN", True)
    monkeypatch.setattr(direct, "raw", lambda kernel, tiled: made.append((kernel, threading.get_ident())) or ("raw of", kernel))
    barrier = threading.Barrier(3)
    kernels = [_Compiled(barrier) for _ in range(3)]
    plan = Plan(launches=[Launch(kernel, 1, ("x",), (), (), ()) for kernel in kernels])
    prepared = launch.Prepared(plan, x.device, [], "x")
    assert prepared.compile({"x": x}, {}) == tuple(kernels)
    assert prepared.raw == [("raw of", kernel) for kernel in kernels]
    assert len({thread for _, thread in made}) == 3
    assert all(kernel.threads == [thread] for kernel, thread in made)
    assert prepared.compile({"x": x}, {}) == tuple(kernels)
    assert len(made) == 3


def test_kernels_of_later_passes_begin_when_all_but_one_are_compiled(monkeypatch):
    begun, x = threading.Event(), torch.ones(2)
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(direct, "KNOWN", False)

    class Slow(_Compiled):
        def warmup(self, *arguments, grid, **options):
            assert begun.wait(timeout=60)
            return super().warmup(*arguments, grid=grid)

    class Fast(_Compiled):
        def warmup(self, *arguments, grid, **options):
            assert not begun.is_set()
            return super().warmup(*arguments, grid=grid)

    alone = threading.Barrier(1)
    plan = Plan(launches=[Launch(kernel, 1, ("x",), (), (), ()) for kernel in (Fast(alone), Slow(alone), Fast(alone))])
    prepared = launch.Prepared(plan, x.device, [], "x")
    prepared.later = begun.set
    prepared.compile({"x": x}, {})
    assert prepared.later is None  # it refers to tensors


@pytest.mark.skipif(direct.VERSION != (3, 6), reason="this Triton compiles no launchers in C")
def test_the_launcher_that_is_compiled_meanwhile_is_the_one_that_triton_loads(monkeypatch):
    """Its source is that of the launcher for encoded descriptors."""
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    sources = []

    def compiled(src, **_):
        sources.append(src)
        return SimpleNamespace(launch=None)

    monkeypatch.setattr(nvidia, "compile_module_from_src", compiled)
    monkeypatch.setattr(nvidia, "library_dirs", list)
    types = ["*bf16", "tensordesc<bf16[64, 64]>", "i32", "fp32", "constexpr"]
    nvidia.CudaLauncher(direct._source(None, types), direct._NO_METADATA)
    metadata = SimpleNamespace(**vars(direct._NO_METADATA), tensordesc_meta=[{"swizzle": 3}])
    nvidia.CudaLauncher(SimpleNamespace(signature=dict(enumerate(types))), metadata)
    assert sources[0] == sources[1]


def test_an_equal_pass_looks_up_no_target_and_plans_nothing(monkeypatch):
    x, looked_up, planned = torch.ones(2), [], []
    kind = SimpleNamespace(plans={})
    seen = SimpleNamespace(kind=kind, bound={})
    p = SimpleNamespace(seen=seen, sizes={}, operator=SimpleNamespace(names=("x",)), x=x)

    def target(device):
        looked_up.append(device)
        return Target("sm_90", 132, 1 << 17)

    def plan(at):
        planned.append(at.arch)
        return Plan()

    for _ in range(3):
        launch.run("pass", p, target, plan, {"x": x})
    assert looked_up == [x.device]
    assert planned == ["sm_90"]
    launch.run("pass", p, target, plan, {"x": x}, x)
    assert len(planned) == 2
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before != "medium" else "high")
    launch.run("pass", p, target, plan, {"x": x})
    assert len(planned) == 3


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    """Triton launches on the current one."""
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: calls.append((grid, arguments, options))

    @contextmanager
    def device(index):
        calls.append(index)
        yield
        calls.append(None)

    monkeypatch.setattr(private, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    kernel = Kernel()
    for name in ("cpu", "cuda:0"):
        assert launch.on_device_of(SimpleNamespace(device=torch.device(name)), kernel) is kernel
    launch.on_device_of(SimpleNamespace(device=torch.device("cuda:1")), kernel)[3, 1](5, N=7)
    assert calls == [1, ((3, 1), (5,), {"N": 7}), None]


def test_every_launch_is_by_a_plan_or_on_the_device_of_its_tensors():
    """No kernel is called as ``penstock_...[grid](...)``."""
    found, launches = [], 0
    for path in Path(launch.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value)
                launches += name.startswith("on_device_of(")
                if re.fullmatch(r"(\w+\.)?penstock_\w+", name):
                    found.append(f"{path}:{node.lineno}")
    assert not found
    assert launches > 20
