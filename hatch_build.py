"""Builds the native CPU library with Zig's C compiler, which comes from PyPI: no compiler is needed on the machine.

The C sources are those of the folders cpu/native in the package: a family of operators or the layers add theirs by having one. Each is
compiled once per instruction set, and all are linked into one shared library that uses nothing but the C library, so that one wheel serves
every Python. A wheel is for the platform of this machine, or for the one that PENSTOCK_PLATFORM names: Zig compiles for all of them.
On other platforms nothing is built, and the `cpu` implementation says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

PACKAGE = Path(__file__).parent / "penstock"
FLAGS = ["-O3", "-std=c11", "-Wall", "-fno-sanitize=all", "-fvisibility=hidden"]
LINK_FLAGS = {
    "so": ["-Wl,--build-id=none", "-Wl,-z,noexecstack"],
    "dylib": ["-Wl,-install_name,@rpath/libpenstock_cpu.dylib"],  # by default the path of the build
    "dll": [],
}


class InstructionSet(NamedTuple):
    """Code that is chosen at run time: its suffix, -mcpu, floats in a vector register, vector registers."""

    suffix: str
    cpu: str
    lanes: int
    registers: int


class Platform(NamedTuple):
    """Zig's name of a target, the suffix of its shared libraries, and the instruction sets of its code."""

    target: str
    suffix: str
    sets: list[InstructionSet]


WIDE = [InstructionSet("avx2", "x86_64_v3", 8, 16), InstructionSet("avx512", "x86_64_v4", 16, 32)]
X86 = [InstructionSet("baseline", "x86_64", 4, 16), *WIDE]
ARM = [InstructionSet("baseline", "generic", 4, 32)]
# The oldest Macs of macOS 11 convert float16 in hardware. Below that a library of the system would, whose calling convention differs.
MAC_X86 = [InstructionSet("baseline", "ivybridge", 4, 16), *WIDE]
PLATFORMS = {  # by the wheel's platform tag
    "manylinux_2_17_x86_64": Platform("x86_64-linux-gnu.2.17", "so", X86),
    "manylinux_2_17_aarch64": Platform("aarch64-linux-gnu.2.17", "so", ARM),
    "musllinux_1_2_x86_64": Platform("x86_64-linux-musl", "so", X86),
    "musllinux_1_2_aarch64": Platform("aarch64-linux-musl", "so", ARM),
    "macosx_11_0_arm64": Platform("aarch64-macos.11.0", "dylib", [InstructionSet("baseline", "apple_m1", 4, 32)]),
    "macosx_11_0_x86_64": Platform("x86_64-macos.11.0", "dylib", MAC_X86),
    "win_amd64": Platform("x86_64-windows-gnu", "dll", X86),
}


def of_this_machine() -> str | None:
    """The tag of this machine's wheels, or None."""
    return next((tag for tag in platform_tags() if tag in PLATFORMS), None)


def library(tag: str) -> str:
    """The file's name, as penstock/cpu looks for it."""
    return f"libpenstock_cpu.{PLATFORMS[tag].suffix}"


def build(package: Path, tag: str, folder: Path) -> Path:
    """Compiles the sources cpu/native/*.c in the package's folders, which may include the headers of cpu/native and of their own folder."""
    native, sources, platform = package / "cpu" / "native", sorted(package.glob("*/cpu/native/*.c")), PLATFORMS[tag]
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", platform.target]
    position = [] if platform.suffix == "dll" else ["-fPIC"]
    with tempfile.TemporaryDirectory() as objects_folder:
        objects = []
        for suffix, cpu, lanes, registers in platform.sets:
            defines = [f"-DLANES={lanes}", f"-DREGISTERS={registers}", f"-DSUFFIX={suffix}"]
            for source in sources:
                objects.append(f"{objects_folder}/{source.parents[2].name}-{source.stem}-{suffix}.o")
                flags = [*FLAGS, *position, f"-mcpu={cpu}", f"-I{native}", *defines]
                subprocess.run([*zig, *flags, "-c", str(source), "-o", objects[-1]], check=True)
        linked = Path(objects_folder) / library(tag)
        subprocess.run([*zig, "-shared", "-s", *LINK_FLAGS[platform.suffix], *objects, "-o", str(linked)], check=True)
        content, found = linked.read_bytes(), folder / library(tag)
        new = found.with_suffix(".new")
        new.write_bytes(without_time(content) if platform.suffix == "dll" else content)
        new.replace(found)  # a new file: a process that has the old one loaded keeps it
    return found


def without_time(dll: bytes) -> bytes:
    """The time of linking is 0: equal sources have equal bytes. It lies after the signature and two numbers of the header."""
    at = int.from_bytes(dll[0x3C:0x40], "little") + 8
    return dll[:at] + bytes(4) + dll[at + 4 :]


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        tag = os.environ.get("PENSTOCK_PLATFORM") or of_this_machine()
        if self.target_name != "wheel" or tag is None:
            return
        if tag not in PLATFORMS:
            raise ValueError(f"PENSTOCK_PLATFORM must be one of {', '.join(PLATFORMS)}, got {tag}.")
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{tag}"
        if version == "editable":
            build(PACKAGE, tag, PACKAGE / "cpu" / "native")
            return
        self.folder = tempfile.TemporaryDirectory()
        built = build(PACKAGE, tag, Path(self.folder.name))
        build_data["force_include"][str(built)] = f"penstock/cpu/native/{built.name}"

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()
