"""The CUDA kernels on a CPU: compiled as C++ with ``gpu.cpp``, which emulates threads and barriers."""

import ctypes
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.gpu.nvrtc import Kernel
from penstock.recurrence.cuda.configuration import HERE as SOURCES

HERE = Path(__file__).parent
OF_A_GPU = (SOURCES / "gpu.cuh").read_text()


@cache
def library(kernel: Kernel) -> ctypes.CDLL:
    text = kernel.source.replace(OF_A_GPU, "")
    with TemporaryDirectory() as folder:
        source, built = Path(folder) / "kernel.h", Path(folder) / "kernel.so"
        source.write_text(re.sub("#pragma unroll.*", "", text))  # a CPU gains nothing, and its compiler would take a minute
        macros = kernel.macros | {"SOURCE": f'"{source}"', "KERNEL": kernel.kernel}
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all"]
        zig = [sys.executable, "-m", "ziglang", "cc"]  # as "c++" it would first compile the library of C++
        subprocess.run([*zig, *flags, *defines, str(HERE / "gpu.cpp"), "-o", str(built)], check=True)
        return ctypes.CDLL(str(built))


def run(kernel: Kernel, blocks: int, device: object, *arguments: ctypes.Structure, backwards: bool = False) -> None:
    """As ``launch.run``, on the CPU."""
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    stray = library(kernel).run(addresses, blocks, kernel.threads, backwards)
    assert not stray, "threads of a block reach different barriers"
