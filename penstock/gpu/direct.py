"""Launches that bypass Triton's runner.

At each launch, the runner looks up the stream, finds the kernel that is compiled for arguments like these, calls hooks and encodes the
descriptors of tiled tensors. Here the caller passes the stream and the kernel (``Launcher``) or its arguments are compared with fewer
steps (``Runner``), and encoded descriptors are cached by address. This requires a Triton version whose launcher is known and was run on a
GPU, and no launch hooks. Otherwise the runner is called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from triton import JITFunction, knobs
from triton.runtime import driver

from ..call.private import raw_stream
from ..call.versions import checked, version
from .hopper import described

VERSION = version("triton")
checked("triton")  # warns of a version newer than those below and than all that were checked
KNOWN = VERSION in {(3, 6), (3, 7)}
"""Whether the arguments of this Triton's ``CompiledKernel.run`` and of its launcher are known."""
KEPT = 64
"""The limit of encoded descriptors per tensor of a launch."""


def hooked() -> bool:
    """Whether Triton has launch hooks, for example those of its profiler."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def altered(kernel: Any) -> bool:
    """Whether Triton's runner calls hooks of a kernel, or compiles it otherwise than without hooks and debugging.

    Such a kernel is another one for equal arguments.
    """
    at = knobs.runtime
    return bool(
        kernel.pre_run_hooks or at.debug or getattr(at, "add_stages_inspection_hook", None) or knobs.compilation.instrumentation_mode
    )


_NO_METADATA = SimpleNamespace(
    global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
    launch_cooperative_grid=False, launch_pdl=False,
)  # fmt: skip
Raw = tuple[Callable[..., object], tuple[Any, ...]]
"""A function that launches a kernel, and the arguments between the stream and the kernel's own."""


def raw(kernel: Any, tiled: bool) -> Raw:
    """The function that the runner of a compiled kernel calls. For tiled tensors, it takes encoded descriptors."""
    run = kernel.run  # loads the kernel
    function, metadata, hooks = kernel.function, kernel.packed_metadata, (None, None, None)
    if tiled and function is not None:  # None if the kernel cannot be loaded: ``run`` raises the reason
        run = _launcher_of_encoded(kernel)
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if VERSION == (3, 6) and type(run).__name__ == "CudaLauncher" and not scratch:  # takes two thirds of the time
        return run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, None, None, metadata, *hooks)
    return run, (function, metadata, *hooks)


def _launcher_of_encoded(kernel: Any) -> Any:
    """Triton's launcher of a kernel, for encoded descriptors."""
    return type(kernel.run)(_source(kernel.src.fn, kernel.src.signature.values()), kernel.metadata._replace(tensordesc_meta=None))


def _source(fn: Any, types: Iterable[str]) -> Any:
    """What Triton makes a launcher for encoded descriptors of."""
    encoded: list[str] = []
    for one in types:
        encoded += ["nvTmaDesc", "i32", "i32", "i64", "i64"] if one.startswith("tensordesc") else [one]
    return SimpleNamespace(fn=fn, constants={}, signature=dict(enumerate(encoded)))


@contextmanager
def launcher_meanwhile(kernel: Any, arguments: Sequence[Any], options: Mapping[str, int], gpu: int | None) -> Iterator[None]:
    """Compile the launcher of a kernel in another thread, while the block compiles the kernel.

    Triton 3.6 compiles one in C for each list of argument types, 0.5 to 1 s, when a kernel is loaded, and caches it on disk. Kernels with
    tiled tensors have the one for encoded descriptors: the source is the same. Errors are raised when the kernel is loaded.
    """
    if VERSION != (3, 6) or gpu is None:
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_make_launcher, kernel, arguments, options, gpu)
        yield


def _make_launcher(kernel: Any, arguments: Sequence[Any], options: Mapping[str, int], gpu: int) -> None:
    with torch.cuda.device(gpu):
        active = driver.active
        *_, bind = kernel.device_caches[active.get_current_device()]
    _, specialized, _ = bind(*arguments, **options)
    if active.launcher_cls.__name__ == "CudaLauncher":
        active.launcher_cls(_source(kernel.fn, [kind for kind, _ in specialized]), _NO_METADATA)


class Launcher:
    """Launches a compiled kernel for equal calls. The descriptors of a tensor differ only in its address."""

    def __init__(self, kernel: Any, run: Raw, tiled: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """``tiled``: the names of the tiled tensors, and the fields that their descriptors share."""
        self.run, self.fixed = run
        self.encoded: list[tuple[str, dict[int, list[Any]], Callable[[Tensor], list[Any]]]] = []
        if tiled:
            for (name, known), layout in zip(tiled, kernel.metadata.tensordesc_meta):
                self.encoded.append((name, {}, partial(_encode, known=known, layout=layout)))

    def __call__(self, grid: int, stream: int, tensors: Mapping[str, Tensor], others: tuple[Any, ...]) -> None:
        """Launch with these tiled tensors and other arguments."""
        tiled: list[Any] = []
        for name, kept, encode in self.encoded:
            x = tensors[name]
            address = x.data_ptr()
            found = kept.get(address)
            if found is None:
                if len(kept) >= KEPT:
                    kept.clear()
                found = kept[address] = encode(x)
            tiled += found
        self.run(grid, 1, 1, stream, *self.fixed, *tiled, *others)


class Runner:
    """Launches a kernel on one GPU, the current one, as Triton's runner does: ``runner[grid](*arguments, **options)``.

    The first launch with arguments that Triton distinguishes goes through its runner, which compiles the kernel. So do all launches with
    arguments that are no tensors and numbers or that are not in their places, those of kernels that need scratch memory, and all while
    Triton has hooks or compiles for debugging.
    """

    def __init__(self, kernel: Any, gpu: int) -> None:
        self.kernel, self.gpu = kernel, gpu
        constants = [one.is_constexpr for one in kernel.params]
        self.count = constants.count(False) if constants == sorted(constants) else None
        """The number of arguments before the constants, which are options. None: constants are among them."""
        self.known: dict[Hashable, tuple[Raw, tuple[Any, ...]] | None] = {}
        """How a kernel is launched, and its constants, by what Triton compiles it for."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> object:
        if len(arguments) != self.count or altered(self.kernel):
            return self.kernel[grid](*arguments, **options)
        kinds: list[Any] = []
        given: list[Any] = []
        for x in arguments:
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                address = x.data_ptr()
                given.append(address)
                kinds += x.dtype, address % 16 == 0
                continue
            given.append(x)
            if kind is int:
                kinds.append(_specialized(x))
            elif kind is float:
                kinds.append(float)
            else:
                return self.kernel[grid](*arguments, **options)
        key = tuple(kinds), tuple(options.items())
        found = self.known.get(key)
        if found is None or hooked():
            compiled = self.kernel[grid](*arguments, **options)
            if compiled is not None and key not in self.known:  # None: a hook of Triton compiled it, and nothing was launched
                self.known[key] = self._raw(compiled, options)
            return compiled
        (run, fixed), constants = found
        x, y, z = (*grid, 1, 1)[:3]
        return run(x, y, z, raw_stream(self.gpu), *fixed, *given, *constants)

    def _raw(self, kernel: Any, options: Mapping[str, Any]) -> tuple[Raw, tuple[Any, ...]] | None:
        """How a compiled kernel is launched, and its constants; None: it goes through the runner."""
        launcher, constants = kernel.run, self.kernel.arg_names[self.count :]
        scratch = getattr(launcher, "global_scratch_size", 0) or getattr(launcher, "profile_scratch_size", 0)
        if scratch or not options.keys() >= set(constants):  # constants may have defaults
            return None
        return raw(kernel, False), tuple([options[name] for name in constants])


def _specialized(x: int) -> int:
    """What Triton distinguishes of an integer: 1, multiples of 16, those of 64 bits."""
    return 1 if x == 1 else (x % 16 == 0) + 2 * (not -(2**31) <= x < 2**31) + 2 + 4 * (x >= 2**63)


_runners: dict[tuple[int, int], Any] = {}


def runner(kernel: Any, gpu: int) -> Any:
    """A kernel that is launched by ``Runner`` where this Triton's launchers are known, else by Triton's runner.

    Also on GPUs of AMD: there Triton distinguishes tensors of at most 2 GB.
    """
    if not KNOWN or torch.version.hip or not isinstance(kernel, JITFunction):
        return kernel
    key = id(kernel), gpu  # Triton takes the hash of a kernel from its source
    found = _runners.get(key)
    if found is None:
        found = _runners[key] = Runner(kernel, gpu)
    return found


def _encode(x: Tensor, known: Mapping[str, Any], layout: Any) -> list[Any]:
    """A descriptor encoded for the hardware, with sizes and strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(described(x, known), layout)  # type: ignore[no-any-return]
