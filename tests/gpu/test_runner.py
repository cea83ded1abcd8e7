"""Launches by ``direct.Runner`` and by Triton's runner: the same compiled kernels, with the same arguments. They need no GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from penstock.gpu import direct

SCRIPT = """
from itertools import product

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import TensorWrapper

from penstock.call.versions import version
from penstock.gpu import direct
from penstock.layers.triton.gates import penstock_gated_fwd as kernel


class Launcher:
    # notes which kernel is launched
    global_scratch_size = profile_scratch_size = 0
    launches = []

    def __init__(self, *given):
        pass

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        passed = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
        self.launches.append(((x, y, z, stream, function), passed))


class Utils:
    # loads each kernel under a number of its own
    loaded = 0

    def load_binary(self, *given):
        self.loaded += 1
        return self.loaded, self.loaded, 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}


class Driver:
    launcher_cls, utils = Launcher, Utils()

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 13

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


driver.set_active(Driver())
direct.raw_stream = lambda gpu: 13
ours, launches = direct.runner(kernel, 0), Launcher.launches
assert ours is direct.runner(kernel, 0) is not direct.runner(kernel, 1)
row = torch.zeros(70, dtype=torch.bfloat16)
tensors = [row, row[1:], row[8:], row.float(), torch.nn.Parameter(row), row.half()]
sizes = [1, 5, 16, 32, 33, 0, 2**31 - 1, 2**31, 2**31 + 1]
options = [{"ACTIVATION": 0, "BLOCK": 64}, {"ACTIVATION": 1, "BLOCK": 64, "num_warps": 2}]
for grid, x, size, constants in product([(3,), (2, 5)], tensors, sizes, options):
    for _ in range(2):
        ours[grid](x, row, x, size, **constants)
    kernel[grid](x, row, x, size, **constants)
    *mine, wanted = launches
    assert mine == [wanted, wanted], (grid, x.dtype, x.data_ptr() % 16, size)
    launches.clear()
assert len(ours.known) >= Driver.utils.loaded > 10


# whatever changes what Triton compiles, or what its runner does, also changes this launch, and later ones do not have it
def launched(*given, **constants):
    ours[3,](*given, **constants)
    kernel[3,](*given, **constants)
    mine, wanted = launches
    launches.clear()
    assert mine == wanted, (given, constants)
    return mine[0][4]


given, constants, hooks = (row, row, row, 5), options[0], []
plain = launched(*given, **constants)
for place, name, value in (
    (knobs.runtime, "debug", True),
    (knobs.compilation, "instrumentation_mode", "other"),
    (knobs.runtime, "add_stages_inspection_hook", lambda *stages: ("key", "hash")),
):
    before = getattr(place, name, None)
    setattr(place, name, value)
    for case in (given, (row.half(), row, row, 5)):  # the first was launched before
        assert launched(*case, **constants) != plain or version("triton") == (3, 6)
    setattr(place, name, before)
    assert launched(*given, **constants) == plain
    assert launched(row.half(), row, row, 5, **constants) != plain
kernel.add_pre_run_hook(lambda *given, **more: hooks.append(given))
launched(*given, **constants)
assert len(hooks) == 2
kernel.pre_run_hooks.clear()
knobs.runtime.jit_cache_hook = lambda **more: True  # nothing is compiled, and nothing runs
ours[3,](row.double(), row, row, 5, **constants)
assert not launches
knobs.runtime.jit_cache_hook = None
launched(row.double(), row, row, 5, **constants)

# constants among the arguments, and arguments among the options
several = [launched(*given, kind, BLOCK=64) for kind in (2, 3, 2)]
assert several[0] == several[2] != several[1]
assert launched(row, row, y=row, size=5, **constants) == plain
assert launched(row, row, y=row[1:], size=5, **constants) != plain

# what it does not know goes through Triton's runner
ran, constants = [], options[0]
ours[3,](row, row, row, 16, **constants)
another = {"__getitem__": lambda self, grid: lambda *given, **more: ran.append(given), "pre_run_hooks": []}
known, ours.kernel = ours.kernel, type("", (), another)()
ours[3,](row, row, row, 16, **constants)
assert not ran
for other in ((row, row, row, True), (row, row, TensorWrapper(row, torch.float16), 16)):
    ours[3,](*other, **constants)
assert len(ran) == 2
hooked, direct.hooked = direct.hooked, lambda: True
ours[3,](row, row, row, 16, **constants)
assert len(ran) == 3
direct.hooked = hooked

# and kernels that need scratch memory
ours, Launcher.global_scratch_size = direct.Runner(known, 0), 8
launches.clear()
for _ in range(2):
    ours[3,](row, row, row, 16, **constants)
assert list(ours.known.values()) == [None]
assert len(launches) == 2

# on AMD, tensors of more than 2 GB are other arguments
torch.version.hip = "7.0"
assert direct.runner(kernel, 0) is kernel
"""


@pytest.mark.skipif(not direct.KNOWN, reason="this Triton's launches go through its runner")
def test_every_launch_runs_the_kernel_that_triton_would_run():
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
