"""Fixtures."""

import importlib.util
import os
import sys
from functools import wraps

import pytest
import torch

collect_ignore = ["support/own_mixer.py"]  # it registers its mixer when it is imported, which the tests do by its own name

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton


@pytest.fixture(autouse=True)
def _one_thread():
    """One thread a test process, so that processes side by side do not fight for cores. Tests of threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _float32_products():
    """Packages may change how torch multiplies float32 when they are imported (rwkv does); plans depend on it."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def _with_boolean_mask(method, place):
    """A method of the interpreter's builder that takes its mask at this place only if its values are booleans."""

    @wraps(method)
    def checked(self, *arguments):
        assert arguments[place].data.dtype == bool, "a scalar condition of a mask must be uniform(condition), see gpu/tiles.py"
        return method(self, *arguments)

    return checked


@pytest.fixture(autouse=True, scope="session")
def _boolean_masks():
    """Triton 3.9 refuses masks that are not booleans under its interpreter. Older versions would hide them."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
            from triton.runtime.interpreter import InterpreterBuilder

            for name, place in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
                patch.setattr(InterpreterBuilder, name, _with_boolean_mask(getattr(InterpreterBuilder, name), place))
        yield


@pytest.fixture
def at_full_speed(monkeypatch):
    """Without the implementations that run under the interpreter here: the contract tests hold those to the oracle."""
    from penstock.call.families import families

    for one in families():
        fast = tuple(implementation for implementation in one.family.implementations if not implementation.name.startswith("triton"))
        monkeypatch.setattr(one.family, "implementations", fast)


@pytest.fixture
def kernels_on_a_cpu(monkeypatch):
    """Triton's kernels of layers take tensors on a CPU, under the interpreter. They refuse float64 as on a GPU."""
    from penstock.gpu.target import interpreting
    from penstock.layers import triton

    if not interpreting():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(triton, "DEVICES", ("cuda", "cpu"))


@pytest.fixture
def emulated_cuda(monkeypatch):
    """The CUDA kernels run on the CPU."""
    import emulated

    from penstock.recurrence.cuda import launch

    monkeypatch.setattr(launch, "run", emulated.run)


@pytest.fixture
def check_in_float32(monkeypatch):
    """``penstock check`` in one dtype."""
    import penstock.cli
    from penstock.verify.verify import findings

    module = sys.modules[f"{penstock.cli.__name__}.check"]  # in its package, the command has its name
    monkeypatch.setattr(module, "findings", lambda: findings(dtypes=(torch.float32,)))


def pytest_addoption(parser):
    parser.addoption("--quarter", type=int, choices=range(4), help="run every fourth test, from this one on")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """After the selection by markers."""
    quarter = config.getoption("--quarter")
    if quarter is not None:
        config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % 4 != quarter])
        items[:] = items[quarter::4]
