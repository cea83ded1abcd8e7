"""Gluon kernels on a CPU: their Python is executed with tensors of torch in the place of Triton's language.

What is emulated is what can go wrong without a GPU noticing: values, addresses, what lies in shared memory when it is read, barriers and
their phases, copies that are still in flight. Layouts are not: they say where a value lies, not what it is.

Warps that divide the work are threads of which one runs at a time; they take turns where one waits for a barrier. A copy into shared
memory leaves NaN there until somebody has waited for its barrier; a copy out of it reads when it is waited for; a product reads its
operands when it is waited for. So a missing wait gives a wrong result, and a barrier that is never completed an error.
"""

from __future__ import annotations

import random
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .language import LANGUAGE, Layout
from .machine import Machine, bar_arrive, bar_expect, bar_init, bar_invalidate, bar_wait, begin, fence, machine, meet
from .memory import Descriptor, Shared, copy_in, copy_out, panels, part_of, store_wait
from .products import mma, mma_wait
from .values import Pointer, Value, flat

_SPECIAL = {
    "gl": LANGUAGE, "tl": LANGUAGE, "gluon": None, "triton": None, "warpgroup_mma": mma, "warpgroup_mma_wait": mma_wait,
    "folded": lambda *layout: None, "in_blocks": lambda layout: None, "by_token": lambda W: None, "by_group": lambda W: None,
    "diagonal_layout": lambda: None, "fence_async_shared": fence, "meet": meet,
    "reinterpret": Shared.reinterpret, "async_load": copy_in, "async_store": copy_out, "panels": panels,
    "cuda": SimpleNamespace(gdc_launch_dependents=lambda: None, gdc_wait=lambda: machine().kernel_ahead()),
    "mma_v2": lambda a, b, acc: mma(a, b, acc), "part_of": part_of,
    "mbarrier": SimpleNamespace(init=bar_init, expect=bar_expect, wait=bar_wait, arrive=bar_arrive, invalidate=bar_invalidate,
                                MBarrierLayout=Layout),
    "tma": SimpleNamespace(store_wait=store_wait),
}  # fmt: skip
_made: dict[int, Any] = {}


def emulated(kernel, replaced=None):
    """A kernel's Python function in which the language is this one."""
    if id(kernel) in _made:
        return _made[id(kernel)]
    from triton.language import constexpr

    fn = kernel.fn
    space: dict[str, Any] = {"__builtins__": fn.__globals__["__builtins__"]}
    made = types.FunctionType(fn.__code__, space, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    _made[id(kernel)] = made
    for name, x in fn.__globals__.items():
        if name in _SPECIAL:
            space[name] = _SPECIAL[name]
        elif hasattr(x, "fn") and callable(getattr(x, "fn", None)) and not isinstance(x, type):
            space[name] = emulated(x)
        elif isinstance(x, constexpr):
            space[name] = x.value
        elif name not in space:
            space[name] = x
    space["max"], space["min"] = max, min
    return made


def launch(kernel, programs, arguments, constants, warps=4, seed=0, late=()):
    """Run all programs of a kernel, a number or one for each axis, one after another in any order.

    Tensors become pointers; descriptors stay.

    ``late``: tensors that the kernel ahead writes. They are NaN, or a large integer, until a program has waited for it, which each must do.
    """
    function = emulated(kernel)
    given = [Pointer(flat(x)) if isinstance(x, torch.Tensor) else x for x in arguments]
    given = [Value(torch.tensor(x, dtype=torch.int32)) if isinstance(x, int) and not isinstance(x, bool) else x for x in given]
    programs = programs if isinstance(programs, tuple) else (programs,)
    count = int(np.prod(programs))
    for number in random.Random(seed).sample(range(count), count):
        pid = tuple(number // int(np.prod(programs[:axis])) % count for axis, count in enumerate(programs))
        one = Machine(pid, seed + number)
        awaited = {name: (x, x.clone()) for name, x in enumerate(late)}
        one.kernel_ahead = lambda awaited=awaited: [x.copy_(values) for x, values in map(awaited.pop, list(awaited))]
        for x in late:
            x.fill_(float("nan") if x.is_floating_point() else 2**40)
        one.bars, one.programs, one.warps, one.memory = {}, programs, warps, []

        def allocate(dtype, shape, one=one):
            one.reuse()
            bytes_ = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
            block = torch.full((bytes_,), 255, dtype=torch.uint8)  # NaN in every float
            one.memory.append(block)
            return block.view(dtype).view(shape)

        one.allocate = allocate
        begin(one, warps)
        function(*given, **constants)
        one.check_reads()
        assert not one.bars, "a barrier that is not invalidated: the compiler may give its memory to others"
        assert not awaited, "a program that does not wait for the kernel ahead"


def run(plan, tensors, sizes, seed=0):
    """All launches of a plan for these sizes. Its memory, NaN at first, is added to the tensors.

    Launches that may begin early do so: until a program has waited, all memory that earlier launches use is NaN.
    """
    plan, used = plan.at(sizes), set()
    for name, (shape, dtype) in plan.memory.items():
        tensors[name] = torch.zeros(shape, dtype=dtype) if dtype == torch.int32 else torch.full(shape, float("nan"), dtype=dtype)
    for one in plan.launches:
        given = [tensors[name] for name in one.tensors]
        tiled = [Descriptor(_matrix(x, tile.axes), (tile.rows, tile.columns)) for x, tile in zip(given, one.tiles)]
        constants = dict(zip(one.kernel.arg_names[-len(one.constants) :], one.constants))
        numbers = [Value(torch.tensor(x)) if place in one.wide else x for place, x in enumerate(one.numbers)]  # 64 bits
        arguments = [*tiled, *given[len(tiled) :], *numbers]
        late = [tensors[name] for name in used if dict(one.options).get("launch_pdl")]
        launch(one.kernel, one.grid, arguments, constants, dict(one.options)["num_warps"], seed, late)
        used |= {name for name in one.tensors if name in plan.memory and tensors[name].is_floating_point()}
    return tensors


def _matrix(x, axes):
    """A tensor as a matrix of its first axes and its last ones, in place. An axis with stride 0 is left out."""
    columns = int(np.prod(x.shape[axes:]))
    return x.as_strided((x.numel() // columns, columns if x.stride(axes) else x.shape[-1]), (x.stride(axes - 1), 1))
