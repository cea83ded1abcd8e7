"""The launches of a call: kernels, grids, constants and memory, computed from sizes and strides.

A ``Plan`` holds no tensor and needs no device. ``launch`` runs it, ``penstock check --compile`` compiles it for other GPUs,
``penstock tune`` times it with other configurations. Grids, numbers and shapes that depend on the numbers of tokens and sequences
are functions of the sizes, so similar calls share one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import hopper

Sizes = Mapping[str, int]
"""The sizes of a problem by axis."""
Size = int | Callable[[Sizes], int]
Number = int | float | Callable[[Sizes], int]


def value(x: Any, sizes: Sizes) -> Any:
    """A size or number for these sizes."""
    return x(sizes) if callable(x) else x


REACH = {"t": 2**7, "h": 2**8, "k": 2**11, "v": 2**11, "d": 2**11}
"""The most tokens, heads and channels of a tile."""


def far(parameter: str, stride: object) -> bool:
    """Whether a number is a stride for which offsets within a tile, sums over two axes, may exceed 32 bits.

    Strides are parameters named by a tensor and an axis: ``q_t``. Offsets of tiles always have 64 bits.
    """
    tensor, _, axis = parameter.rpartition("_")
    return bool(tensor) and isinstance(stride, int) and abs(stride) * REACH.get(axis, 0) >= 2**30


class Launch(NamedTuple):
    """One kernel: its tensors by name, then numbers, then compile-time constants, in the order of its parameters."""

    kernel: Any
    grid: Any
    tensors: tuple[str, ...]
    numbers: tuple[Any, ...]
    constants: tuple[Any, ...]
    options: tuple[tuple[str, int], ...]
    """For Triton's compiler: warps, and the initial registers per thread if the kernel reallocates them."""
    tiles: tuple[hopper.Tile, ...] = ()
    """For the first tensors, the tiles in which the hardware copies them."""
    wide: tuple[int, ...] = ()
    """The indices of numbers that have 64 bits in the kernel, see ``far``. So products with them have 64 bits, too."""
    writes: tuple[str, ...] = ()
    """All tensors that it writes, where another call may share them, see ``sharing.py``."""

    @property
    def typed(self) -> tuple[Any, ...]:
        """The numbers for the compiler, which infers types from values. Adding 2^32 does not change divisibility by 16."""
        return tuple([x + 2**32 if place in self.wide else x for place, x in enumerate(self.numbers)])

    def descriptions(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """The descriptors of the tiled tensors."""
        return [hopper.description(tensors[name], tile) for name, tile in zip(self.tensors, self.tiles)]

    def arguments(self, tensors: Mapping[str, Tensor]) -> list[Any]:
        """The tensor arguments of the kernel: descriptors of the tiled tensors, then the other tensors."""
        tiled = [hopper.described(tensors[name], one) for name, one in zip(self.tensors, self.descriptions(tensors))]
        return tiled + [tensors[name] for name in self.tensors[len(tiled) :]]


@dataclass
class Plan:
    """Memory to allocate, by name, and kernels to launch one after another."""

    memory: dict[str, tuple[tuple[Any, ...], torch.dtype]] = field(default_factory=dict)
    """Shapes and dtypes; ``at`` turns functions of the sizes into integers."""
    launches: list[Launch] = field(default_factory=list)
    constants: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Constant tensors by name: a function and its arguments except the last, the device."""
    forms: list[str] = field(default_factory=list)
    """The names of the forms whose launches these are, see ``forms.py``."""
    keeps: bool = False
    """Whether other calls may take what its shared launches write, because no other launch of it writes there."""

    def at(self, sizes: Sizes) -> Plan:
        """The plan for these sizes: all grids, numbers and shapes are integers."""
        memory = {name: (tuple([value(size, sizes) for size in shape]), dtype) for name, (shape, dtype) in self.memory.items()}
        numbers = [tuple([value(x, sizes) for x in one.numbers]) for one in self.launches]
        launches = [one._replace(grid=value(one.grid, sizes), numbers=found) for one, found in zip(self.launches, numbers)]
        return Plan(memory, launches, self.constants, self.forms, self.keeps)

    def empty(self, name: str, *shape: Size, dtype: torch.dtype = torch.float32) -> str:
        """Plan uninitialised memory."""
        self.memory[name] = (shape, dtype)
        return name

    def constant(self, name: str, function: Callable[..., Tensor], *arguments: Any) -> str:
        """Plan a constant tensor, ``function(*arguments, device)``, made once per device."""
        self.constants[name] = (function, *arguments)
        return name

    def launch(
        self, kernel: Any, grid: Size, tensors: tuple[str, ...], numbers: tuple[Number, ...], warps: int,
        tiles: tuple[hopper.Tile, ...] = (), registers: int = 0, fused: bool = True, early: bool = False, writes: tuple[str, ...] = (),
        **constants: Any,
    ) -> None:  # fmt: skip
        """Plan a launch; ``constants`` in any order. ``fused``: the compiler may fuse multiplications and additions.

        ``early``: the launch may begin while the one before it runs (programmatic dependent launch). ``writes``: see ``Launch.writes``.
        """
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        strides = kernel.arg_names[len(tensors) : len(tensors) + len(numbers)]
        wide = tuple([place for place, (name, x) in enumerate(zip(strides, numbers)) if far(name, x)])
        options: tuple[tuple[str, int], ...] = (("num_warps", warps),)
        if registers:
            options += (("maxnreg", registers),)
        if not fused:
            options += (("enable_fp_fusion", False),)
        if early:
            options += (("launch_pdl", True),)
        self.launches.append(Launch(kernel, grid, tensors, numbers, tuple(constants[name] for name in names), options, tiles, wide, writes))


class Planned(NamedTuple):
    """A plan whose grids, numbers and shapes are integers, and its tensors by name, which may have no memory.

    Missing optional tensors get another tensor as a dummy pointer.
    """

    plan: Plan
    tensors: dict[str, Tensor]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides[::-1])


def dense(indices: Tensor | None) -> Tensor | None:
    """Contiguous offsets or slots, as the GPU kernels read them."""
    return None if indices is None else indices.contiguous()


def chunks(T: int, L: int, N: int, packed: bool) -> int:
    """The most chunks of L tokens in N sequences of T tokens each; if packed, of T tokens in total. See ``tiles.span_of``."""
    return T // L + N if packed else N * -(-T // L)


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """The strides of all axes of all tensors, in the order of kernel parameters."""
    return tuple(stride for x in tensors for stride in x.stride())
