"""The launches that are compiled ahead of time: those of the calls that families register, and of every form of every chain of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..call.families import families
from ..gpu.plan import Launch
from ..gpu.target import Target
from .ahead import Job, jobs
from .chains import ChainCall, chain_calls


def configurations(arch: str) -> tuple[Any, ...]:
    """The calls that are compiled for an architecture: those of families, and all chains."""
    return *(call for one in families() if one.compiled is not None for call in one.compiled(arch)), *chain_calls()


def launches(one: Any, target: Target) -> Iterator[tuple[str, Job]]:
    """Yield each launch of a call with its name."""
    if isinstance(one, ChainCall):
        yield from one.launches(target)
        return
    for which, made in one.planned(target):
        times: Counter[str] = Counter()
        for launch, job in zip(made.plan.launches, jobs(made, target.arch)):
            name = f"{one.name}: {which}: {_kernel(launch)}"
            times[name] += 1
            yield name + f" {times[name]}" * (times[name] > 1), job


def _kernel(launch: Launch) -> str:
    """Name of the kernel, with the flags that distinguish several launches of a pass."""
    first = len(launch.tensors) + len(launch.numbers)
    constants = dict(zip(launch.kernel.arg_names[first:], launch.constants))
    name: str = launch.kernel.fn.__name__
    return name + " adjoint" * bool(constants.get("ADJOINT")) + " levels" * (constants.get("PART") == 2)
