"""Launches that bypass Triton's runner.

At each launch, the runner looks up the stream, calls hooks and encodes the descriptors of tiled tensors. Here the caller passes the stream,
and encoded descriptors are cached by address. This requires a Triton version whose launcher is known and was run on a GPU, and no launch
hooks. Otherwise ``launch`` calls the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from triton import knobs

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
    types: list[str] = []
    for one in kernel.src.signature.values():
        types += ["nvTmaDesc", "i32", "i32", "i64", "i64"] if one.startswith("tensordesc") else [one]
    source = SimpleNamespace(fn=kernel.src.fn, constants={}, signature=dict(enumerate(types)))
    return type(kernel.run)(source, kernel.metadata._replace(tensordesc_meta=None))


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


def _encode(x: Tensor, known: Mapping[str, Any], layout: Any) -> list[Any]:
    """A descriptor encoded for the hardware, with sizes and strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(described(x, known), layout)  # type: ignore[no-any-return]
