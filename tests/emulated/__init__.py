"""The CUDA kernels on a CPU: compiled as C++ beside ``gpu.cpp``, which stands in for the GPU."""

import ctypes
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.kernels.cuda.compile import HERE as SOURCES
from penstock.kernels.cuda.compile import Configuration
from penstock.kernels.cuda.launch import Call

HERE = Path(__file__).parent


@cache
def library(configuration: Configuration) -> ctypes.CDLL:
    text = "\n".join((SOURCES / name).read_text() for name in ("tokens.cuh", f"{configuration.kernel}.cu"))
    with TemporaryDirectory() as folder:
        source, built = Path(folder) / "kernel.h", Path(folder) / "kernel.so"
        source.write_text(re.sub("#pragma unroll.*", "", text))  # a CPU gains nothing, and its compiler would take a minute
        macros = configuration.macros | {"SOURCE": f'"{source}"', "KERNEL": configuration.kernel}
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all"]
        zig = [sys.executable, "-m", "ziglang", "cc"]  # as "c++" it would first compile the library of C++
        subprocess.run([*zig, *flags, *defines, str(HERE / "gpu.cpp"), "-o", str(built)], check=True)
        return ctypes.CDLL(str(built))


def run(configuration: Configuration, blocks: int, call: Call, device: object, backwards: bool = False) -> None:
    """In the place of ``launch.run``."""
    stray = library(configuration).run(ctypes.byref(call), blocks, configuration.threads, backwards)
    assert not stray, "threads of a block came to different barriers"
