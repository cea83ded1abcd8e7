"""Compiles the CUDA sources at run time with NVRTC, and caches the machine code on disk. It needs neither nvcc nor a GPU.

NVRTC comes with torch's CUDA wheels and is called through ``cuda-core``. The name of a cached file is a hash of everything that its content
depends on (source, options, architecture, version of NVRTC), so a cached file is never out of date. The files are in
``~/.cache/penstock/cuda`` (or under ``XDG_CACHE_HOME``) and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import torch

from ...errors import PenstockError
from ...files import usual_mode

HERE = Path(__file__).parent
TYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double"}
INDICES = {torch.int32: "int", torch.int64: "long long"}


class Kernel(Protocol):
    """A kernel that can be compiled and launched."""

    @property
    def kernel(self) -> str:
        """The function's name."""

    @property
    def source(self) -> str:
        """The source as one text, so that NVRTC need not find headers."""

    @property
    def macros(self) -> dict[str, str]:
        """Macros that the source expects."""

    @property
    def threads(self) -> int:
        """Threads per block."""

    def __hash__(self) -> int:
        """Hash and equality: equal kernels are loaded once."""


@dataclass(frozen=True)
class Configuration:
    """A kernel and its compile-time parameters. The dtype of a missing tensor has no effect."""

    direction: Literal["forward", "backward"]
    head: int
    """K = V."""
    tokens: torch.dtype
    """The dtype of q, k, v, output and their gradients."""
    gate: torch.dtype
    bonus: torch.dtype = torch.float32
    initial_state: torch.dtype = torch.float32
    final_state: torch.dtype = torch.float32
    """The dtype of states: float32, or the dtype of the pool that a decode step updates."""
    indices: torch.dtype = torch.int64
    """The dtype of cu_seqlens or slots."""
    static: bool = False
    """Whether all tokens have the same decay."""

    @property
    def kernel(self) -> str:
        """The function's name, as a profile shows it."""
        return {"forward": "penstock_wkv_fwd", "backward": "penstock_wkv_bwd"}[self.direction]

    @property
    def source(self) -> str:
        """The source as one text, so that NVRTC need not find headers."""
        return "\n".join((HERE / name).read_text("utf-8") for name in ("gpu.cuh", "tokens.cuh", "decays.cuh", f"{self.direction}.cu"))

    @property
    def macros(self) -> dict[str, str]:
        """Macros that the source expects."""
        return {
            "HEAD": str(self.head),
            "X": TYPES[self.tokens],
            "G": TYPES[self.gate],
            "U": TYPES[self.bonus],
            "S0": TYPES[self.initial_state],
            "F": TYPES[self.final_state],
            "I": INDICES[self.indices],
            "STATIC": str(self.static).lower(),
        }

    @property
    def threads(self) -> int:
        """Threads per block; tokens.cuh describes what each thread computes."""
        return 2 * self.head


def machine_code(kernel: Kernel, arch: str) -> bytes:
    """The cubin for an architecture such as "sm_90": the cached file if it exists and is complete; otherwise compiled and cached."""
    path = kept_at(kernel, arch)
    code = _read(path)
    if code is None:
        code, _ = compiled(kernel, arch)
        _write(path, code)
    return code


def compiled(kernel: Kernel, arch: str) -> tuple[bytes, str]:
    """The cubin, and the compiler's report on registers, spills and shared memory. Raises PenstockError if compilation fails."""
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    macros = list(kernel.macros.items())
    try:
        options = ProgramOptions(arch=arch, std="c++17", define_macro=macros, ptxas_options=["-v"])
        code = Program(kernel.source, "c++", options).compile("cubin", logs=log).code
    except Exception as failure:  # from NVRTC, or there is no NVRTC
        raise PenstockError(
            f"cuda: NVRTC {'.'.join(map(str, nvrtc_version()))} must be able to compile the {kernel.kernel} kernel for {arch}, got "
            f"{failure}. Install another nvidia-cuda-nvrtc, or use impl='auto'.\n{log.getvalue()}".rstrip()
        ) from failure
    assert isinstance(code, bytes)
    return code, log.getvalue()


@cache
def nvrtc_version() -> tuple[int, int]:
    """Major and minor."""
    from cuda.bindings import nvrtc

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as failure:
        raise PenstockError(f"cuda: NVRTC must load, got {failure}. Install nvidia-cuda-nvrtc, or use impl='auto'.") from failure
    return int(major), int(minor)


def kept_at(kernel: Kernel, arch: str) -> Path:
    """The path of the cached machine code."""
    everything = repr((kernel.source, sorted(kernel.macros.items()), arch, nvrtc_version()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "cuda"
    return folder / f"{kernel.kernel}-{arch}-{hashlib.sha256(everything.encode()).hexdigest()[:32]}"


def _read(path: Path) -> bytes | None:
    """The machine code that follows its checksum in the file; None if the file is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == checksum else None


def _write(path: Path, code: bytes) -> None:
    """Rename a complete file into place. If the folder cannot be written, the next process compiles again (about a second)."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as new:
            new.write(hashlib.sha256(code).digest() + code)
        usual_mode(Path(new.name))
        os.replace(new.name, path)
