"""Without any one of torch's private names, calls go through the public operators and give the same results."""

import importlib
import inspect
import operator
import re
from contextlib import suppress

import pytest
import torch
from attention import Attention
from cases import Case
from contract import run
from pools import Pooled
from sampling import every

import penstock as ps
from penstock.call import private, versions

NAMES = re.findall(r'_private\("(.+?)"\)', inspect.getsource(private))
CASES = [
    Case("rwkv6", T=9, K=4, V=4),
    Case("gla", lengths=(4, 0, 5), K=4, V=4),
    Pooled("rwkv6", H=2, K=4, V=4, lengths=(1, 70), slots=(5, 2)),
    Attention(B=1, Tq=9, Tk=9, D=4),
]


def reloaded(monkeypatch, *hidden):
    """``private`` as it is where torch does not have these names."""
    found = operator.attrgetter

    def attrgetter(name):
        if name in hidden:
            raise AttributeError(name)
        return found(name)

    with monkeypatch.context() as patch:
        patch.setattr(operator, "attrgetter", attrgetter)
        importlib.reload(private)


@pytest.fixture
def another_torch(monkeypatch):
    """A function that reloads ``private`` as it is with another version of torch."""

    def pretend(text):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "__version__", text)
            versions.checked.cache_clear()
            importlib.reload(private)

    yield pretend
    versions.checked.cache_clear()
    importlib.reload(private)


@pytest.fixture
def without(monkeypatch):
    """A function that hides names."""
    yield lambda *hidden: reloaded(monkeypatch, *hidden)
    importlib.reload(private)


def results(transforms=True):
    """Of every case, under torch's modes, of a compiled function, and of transforms. Values are still validated."""
    found = [x for case in CASES for x in run(case, case.tensors(), case.upstream(), "auto").values()]
    q, k, v = (torch.randn(1, 5, 2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        found.append(ps.retention(q, k, v).output)
    with torch.no_grad():
        found.append(ps.retention(q, k, v.clone().requires_grad_()).output)
    with torch.inference_mode():
        found.append(ps.retention(q, k, v).output.clone())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        found.append(ps.retention(q, k, v).output)
    torch.compiler.reset()
    found.append(torch.compile(lambda q: ps.gla(q, k, v, -q.abs()).output, fullgraph=True, backend="aot_eager")(q))
    with pytest.raises(ps.RangeError, match="nowhere above 0"):
        ps.gla(q, k, v, q)
    if transforms:
        found.append(torch.func.grad(lambda q: ps.gla(q, k, v, -q.abs()).output.sum())(q))
        found.append(torch.func.vmap(lambda q: ps.gla(q, k, v, -q.abs()).output)(torch.stack([q, -q])))
        found.append(torch.func.jvp(lambda q: ps.gla(q, k, v, -q.abs()).output, (q,), (k,))[1])
    return found


def test_this_torch_has_all_names():
    assert private.MISSING == []
    assert private.FAST_PATH


class Mode(torch.overrides.TorchFunctionMode):
    """Sees every function of torch."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


def test_default_devices_are_no_modes():
    """Calls are as fast, and the kernels of layers run. With another mode inside or outside, all of torch's functions are called."""
    x = (torch.ones(2),)
    with torch.device("cpu"):
        assert private.fast(x)
        with torch.device("meta"):
            assert private.fast(x)
            assert ps.retention(*[torch.ones(1, 3, 2, 4, device="cpu")] * 3).output.device.type == "cpu"
        with Mode():
            assert not private.fast(x)
    with Mode(), torch.device("cpu"):
        assert not private.fast(x)
    torch.set_default_device("cpu")
    try:
        assert private.fast(x)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_implementations_allocate_on_the_device_of_a_call(case):
    """Whatever the default device."""
    for impl in ("auto", *(one.name for one in case.operator.family.implementations if one.available() is None)):
        found = []
        for device in ("cpu", "meta"):
            tensors, upstream = case.tensors(), case.upstream()
            with torch.device(device), suppress(ps.ImplementationRefused):
                found.append(run(case, tensors, upstream, impl))
        assert len(found) in (0, 2)
        for one, other in zip(*(each.values() for each in found)):
            assert torch.equal(one, other)


def test_a_newer_torch_warns_once_and_its_public_names_are_used(another_torch):
    wanted = results()
    with pytest.warns(UserWarning, match="penstock: torch 2.99 is newer than") as warned:
        another_torch("2.99.0a0+git1")
    found = results()
    assert len(warned) == 1
    assert not private.FAST_PATH
    assert (private._raw_stream, private._current_device, private._empty_cuda) == (None, None, None)
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("text", ["2.8.0", "2.11.0+cu128", ".".join(map(str, versions.NEWEST["torch"])) + ".7"])
def test_torch_versions_that_were_checked(another_torch, text):
    another_torch(text)
    assert private.FAST_PATH


@pytest.mark.parametrize("name", every(8, NAMES))
def test_results_without_one_private_name(name, without):
    wanted = results()
    without(name)
    assert name in private.MISSING or "cuda" in name  # a stream is looked up by a torch with CUDA
    for found, x in zip(results(), wanted, strict=True):
        assert torch.equal(found, x)


def test_results_without_any_private_name(without):
    wanted = results(transforms=False)
    without(*NAMES)
    assert not private.FAST_PATH
    for found, x in zip(results(transforms=False), wanted, strict=True):
        assert torch.equal(found, x)
