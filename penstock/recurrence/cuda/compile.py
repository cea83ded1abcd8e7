"""Compiles the CUDA sources at run time with NVRTC, and keeps the machine code on disk. No compiler and no GPU are needed for it.

NVRTC comes with torch's CUDA wheels; ``cuda-core`` speaks to it. Kept files are named after all that their content depends on (source,
options, architecture, version of NVRTC), so none is ever out of date; they lie in ``~/.cache/penstock/cuda`` (or under
``XDG_CACHE_HOME``) and may be deleted at any time.
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

HERE = Path(__file__).parent
TYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double"}
INDICES = {torch.int32: "int", torch.int64: "long long"}


class Kernel(Protocol):
    """What can be compiled and launched."""

    @property
    def kernel(self) -> str:
        """The function's name."""

    @property
    def source(self) -> str:
        """One text: headers would have to be found."""

    @property
    def macros(self) -> dict[str, str]:
        """What the source expects from the command line."""

    @property
    def threads(self) -> int:
        """In a block."""

    def __hash__(self) -> int:
        """Kernels that are equal are loaded once."""


@dataclass(frozen=True)
class Configuration:
    """A kernel and what it is specialised to; dtypes of tensors that a call has not are those of stand-ins."""

    kernel: Literal["forward", "backward"]
    head: int
    """K = V."""
    tokens: torch.dtype
    """Of q, k, v, output and their gradients."""
    gate: torch.dtype
    bonus: torch.dtype = torch.float32
    initial_state: torch.dtype = torch.float32
    final_state: torch.dtype = torch.float32
    """float32 but for a pool of states that a decode step updates."""
    indices: torch.dtype = torch.int64
    """Of cu_seqlens or slots."""
    static: bool = False
    """Whether the decay is one for all tokens."""

    @property
    def source(self) -> str:
        """One text: headers would have to be found."""
        return "\n".join((HERE / name).read_text() for name in ("gpu.cuh", "tokens.cuh", "decays.cuh", f"{self.kernel}.cu"))

    @property
    def macros(self) -> dict[str, str]:
        """What the source expects from the command line."""
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
        """In a block; tokens.cuh says who does what."""
        return 2 * self.head


def machine_code(kernel: Kernel, arch: str) -> bytes:
    """The cubin for an architecture such as "sm_90": the kept one if there is one and it is whole, else compiled and kept."""
    path = kept_at(kernel, arch)
    code = _read(path)
    if code is None:
        code, _ = compiled(kernel, arch)
        _write(path, code)
    return code


def compiled(kernel: Kernel, arch: str) -> tuple[bytes, str]:
    """The cubin and what the compiler says of registers, spills and shared memory. Raises PenstockError with its log if it fails."""
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    macros = list(kernel.macros.items())
    try:
        options = ProgramOptions(arch=arch, std="c++17", define_macro=macros, ptxas_options=["-v"])
        code = Program(kernel.source, "c++", options).compile("cubin", logs=log).code
    except Exception as failure:  # of NVRTC, or there is none
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
    """Where the machine code is kept."""
    everything = repr((kernel.source, sorted(kernel.macros.items()), arch, nvrtc_version()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "cuda"
    return folder / f"{kernel.kernel}-{arch}-{hashlib.sha256(everything.encode()).hexdigest()[:32]}"


def _read(path: Path) -> bytes | None:
    """What was kept, after its checksum; None if there is nothing, or it is not what was written."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == checksum else None


def _write(path: Path, code: bytes) -> None:
    """Keep it under its name only when it is whole; a folder that cannot be written costs the next process a second."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as new:
            new.write(hashlib.sha256(code).digest() + code)
        os.replace(new.name, path)
