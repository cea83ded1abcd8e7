"""How launches reach Triton. They need no GPU."""

import inspect

import pytest

triton = pytest.importorskip("triton")

from penstock.gpu import launch  # noqa: E402


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_tools_are_noticed(hook):
    def watch(metadata):
        raise AssertionError

    before = getattr(triton.knobs.runtime, hook)
    assert not launch._hooked()
    if hasattr(before, "add"):
        before.add(watch)
        assert launch._hooked()
        before.remove(watch)
    assert not launch._hooked()
    setattr(triton.knobs.runtime, hook, watch)
    assert launch._hooked()
    setattr(triton.knobs.runtime, hook, before)
    assert not launch._hooked()


def test_triton_runs_compiled_kernels_as_launches_do():
    """Bound.run calls a kernel's ``run`` with the arguments that Triton's runner passes."""
    runner = inspect.getsource(triton.compiler.CompiledKernel.__getitem__).split()
    passed = "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, launch_metadata,"
    assert passed in " ".join(runner)
