"""Builds the native CPU library with Zig's C compiler, which comes from PyPI: no compiler is needed on the machine.

The C sources are those of the folders cpu/native in the package: a family of operators or the layers add theirs by having one. Each is
compiled once per instruction set, and all are linked into one shared library that uses nothing but the C library, so that one wheel serves
every Python. On systems other than Linux nothing is built, and the `cpu`
implementation says so.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path(__file__).parent / "penstock"
GLIBC = "2.17"
# suffix, -mcpu, floats in a vector register, vector registers
TARGETS = {
    "x86_64": [("baseline", "x86_64", 4, 16), ("avx2", "x86_64_v3", 8, 16), ("avx512", "x86_64_v4", 16, 32)],
    "aarch64": [("baseline", "generic", 4, 32)],
}


def build(package: Path) -> None:
    """Compiles the sources cpu/native/*.c in the package's folders, which may include the headers of cpu/native and of their own folder."""
    native, sources = package / "cpu" / "native", sorted(package.glob("*/cpu/native/*.c"))
    machine = platform.machine()
    triple = f"{machine}-linux-gnu.{GLIBC}"
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", triple, "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for suffix, cpu, lanes, registers in TARGETS[machine]:
            defines = [f"-DLANES={lanes}", f"-DREGISTERS={registers}", f"-DSUFFIX={suffix}"]
            flags = ["-O3", "-std=c11", "-Wall", "-fno-sanitize=all", f"-mcpu={cpu}", f"-I{native}", *defines]
            for source in sources:
                objects.append(f"{folder}/{source.parents[2].name}-{source.stem}-{suffix}.o")
                subprocess.run([*zig, *flags, "-c", str(source), "-o", objects[-1]], check=True)
        linked = native / "libpenstock_cpu.so.new"
        subprocess.run([*zig, "-shared", "-s", *objects, "-o", str(linked)], check=True)
        linked.replace(native / "libpenstock_cpu.so")  # a new file: a process that has the old one loaded keeps it


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        if self.target_name != "wheel" or platform.system() != "Linux" or platform.machine() not in TARGETS:
            return
        build(PACKAGE)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
