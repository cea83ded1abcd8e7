"""What versions of Triton do not compile."""

import pytest
import torch

from penstock.gpu import target
from penstock.gpu.target import Target, uncompiled
from penstock.layers.triton import launch


@pytest.fixture
def older(monkeypatch):
    """Triton 3.4, on a GPU that may be absent."""
    for module in (target, launch):
        monkeypatch.setattr(module, "version", lambda package: (3, 4))
    launch.early.cache_clear()
    yield lambda arch: monkeypatch.setattr(Target, "of", lambda device: Target(arch, 132, 200_000))
    launch.early.cache_clear()


class OnGPU:
    """A tensor, as far as its device matters."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_an_old_triton(older, arch):
    """Kernels with several products are refused on sm_100 alone; none begins early, and products have 16 rows."""
    older(arch)
    reason = "Triton 3.4 does not compile it for this GPU (sm_100): install Triton 3.5 or newer" if arch == "sm_100" else None
    assert uncompiled(OnGPU()) == reason
    assert launch.early(OnGPU.device) == {}
    assert [launch.multiplied(rows) for rows in (1, 8, 9, 17)] == [16, 16, 16, 32]


@pytest.mark.skipif(target.version("triton") < (3, 5), reason="this Triton is older")
def test_a_newer_triton(monkeypatch):
    monkeypatch.setattr(Target, "of", lambda device: Target("sm_100", 132, 200_000))
    launch.early.cache_clear()
    assert uncompiled(OnGPU()) is None
    assert launch.early(OnGPU.device) == {"launch_pdl": True}
    assert [launch.multiplied(rows) for rows in (1, 8, 9, 17)] == [8, 8, 16, 32]
    launch.early.cache_clear()
