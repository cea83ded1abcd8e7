"""Fixtures."""

import importlib.util
import os
import sys
import time
from collections import Counter

import pytest
import sampling
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


@pytest.fixture(autouse=True, scope="session")
def _interpreter():
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
            import interpreted

            interpreted.patched(patch)
        yield


@pytest.fixture
def alone():
    """A process group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


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
def no_native_kernels(monkeypatch):
    """Chains find no native kernels: others compute in their place."""
    from penstock.layers import cpu
    from penstock.layers.cpu import linear

    monkeypatch.setattr(cpu, "unavailable", lambda *functions: "the native library is turned off")
    monkeypatch.setattr(linear, "UNAVAILABLE", "the native library is not used")


@pytest.fixture
def ran(kernels_on_a_cpu):
    """A function that counts the forms of chains that ran by kernels, which take tensors on a CPU."""
    from penstock.layers.chains import Choice, recorded

    with recorded(torch.nn.Module()) as found:
        yield lambda: Counter(one.form for one in found if isinstance(one, Choice) and one.kernels)


@pytest.fixture
def emulated_cuda(monkeypatch):
    """The CUDA kernels run on the CPU."""
    import emulated

    from penstock.gpu import nvrtc
    from penstock.recurrence.cuda import launch

    for module in (nvrtc, launch):
        monkeypatch.setattr(module, "run", emulated.run)


@pytest.fixture
def check_in_float32(monkeypatch):
    """``penstock check`` in one dtype."""
    import penstock.cli
    from penstock.verify.verify import findings

    module = sys.modules[f"{penstock.cli.__name__}.check"]  # in its package, the command has its name
    monkeypatch.setattr(module, "findings", lambda: findings(dtypes=(torch.float32,)))


def pytest_addoption(parser):
    parser.addoption("--part", help="1/16: run every sixteenth test, from the second on")
    parser.addoption("--minutes", type=float, help="skip the tests that have not begun after so many minutes")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    sampling.mark_slow(items)
    selected = yield  # by markers
    if config.getoption("--part") is not None:
        part, parts = map(int, config.getoption("--part").split("/"))
        config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % parts != part])
        items[:] = items[part::parts]
    return selected


BEGUN = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - BEGUN > 60 * minutes:
        pytest.skip(f"not begun within {minutes:g} minutes")


def pytest_terminal_summary(terminalreporter):
    """How many tests were skipped for which reason."""
    skipped = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.section("skipped tests by reason")
    for reason, count in skipped.most_common():
        terminalreporter.write_line(f"{count:6}  {reason}")
