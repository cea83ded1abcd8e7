"""Kernels in CUDA C++: compiled at run time with NVRTC, cached on disk, and launched. Compiling needs neither nvcc nor a GPU.

NVRTC comes with torch's CUDA wheels and is called through ``cuda-core``. The name of a cached file is a hash of everything that its content
depends on (source, options, architecture, version of NVRTC), so a cached file is never out of date. The files are in
``~/.cache/penstock/cuda`` (or under ``XDG_CACHE_HOME``) and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import os
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from ..call import private
from ..errors import PenstockError, installing
from ..files import usual_mode


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


@cache
def available() -> str | None:
    """Why CUDA kernels cannot be compiled or run on this machine, or None."""
    if not torch.cuda.is_available() or torch.version.hip:
        return "torch sees no NVIDIA GPU here"
    try:
        missing = find_spec("cuda.core") is None or find_spec("cuda.bindings") is None
    except ModuleNotFoundError:
        missing = True
    return f"cuda-core is not installed: {installing('cuda')}" if missing else None


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


def run(kernel: Kernel, blocks: int, device: torch.device, *arguments: ctypes.Array[Any] | ctypes._SimpleCData[Any]) -> None:
    """Launch a number of thread blocks. The tests replace this function by an emulation on the CPU."""
    if device.index != private.current_device():
        with torch.cuda.device(device):
            return run(kernel, blocks, device, *arguments)
    driver = _driver()
    _ensure_context(device.index)
    function, stream = _function(kernel, device.index), private.raw_stream(device.index)
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    (status,) = driver.cuLaunchKernel(function, blocks, 1, 1, kernel.threads, 1, 1, 0, stream, ctypes.addressof(addresses), 0)
    _check(status, "launch")


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _ensure_context(device: int) -> None:
    """Set torch's context in a thread that has none: a new thread has no current CUDA context."""
    driver = _driver()
    status, context = driver.cuCtxGetCurrent()
    _check(status, "have a context for")
    if not int(context):
        status, handle = driver.cuDeviceGet(device)
        _check(status, "find the device for")
        status, context = driver.cuDevicePrimaryCtxRetain(handle)
        _check(status, "have a context for")
        (status,) = driver.cuCtxSetCurrent(context)
        _check(status, "have a context for")


@cache
def _function(kernel: Kernel, device: int) -> object:
    """The kernel, compiled or found on disk, and loaded into torch's context of a device, which must be the current one."""
    driver = _driver()
    major, minor = torch.cuda.get_device_capability(device)
    code = machine_code(kernel, f"sm_{major}{minor}")
    status, module = driver.cuModuleLoadData(code)
    _check(status, "load")
    status, function = driver.cuModuleGetFunction(module, kernel.kernel.encode())
    _check(status, "find")
    return function


def _check(status: object, what: str) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        raise PenstockError(f"cuda: the driver must {what} the kernel, got {status}. Use impl='auto', and please report it.")
