"""What this machine has, which implementations ``impl="auto"`` takes here, and what is missing: for `penstock doctor`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import torch

from ..call.dispatch import Explanation
from ..call.families import Registered, families
from ..errors import DISTRIBUTION
from ..explain import explain
from ..tokens.shape import Shape
from .inputs import inputs
from .machine import Machine, installed

SHAPE = Shape(1, 64, 2, 64, 64)
"""Of the calls that are explained."""
DEVELOPMENT = ("dev", "integrations", "test")
"""Extras that users do not need."""


@dataclass(frozen=True)
class Taken:
    """What a family runs on a device. Its variants have the same answer, unless it differs and they have rows of their own."""

    family: str
    device: str
    dtype: str
    functions: tuple[str, ...]
    forward: str | None
    """The implementation that ``impl="auto"`` takes, or None."""
    backward: str | None
    forms: tuple[str, ...]
    """The forms (kernels, or fixed groups of kernels) of these that run."""
    refused: tuple[tuple[str, str], ...]
    """The implementations before it in the list, and why they do not run."""


@dataclass(frozen=True)
class Extra:
    """Optional packages."""

    name: str
    missing: tuple[str, ...]
    """Packages that are not installed."""


@dataclass(frozen=True)
class Diagnosis:
    """All answers."""

    machine: Machine
    build: str
    """The GPU platform that torch was built for, or "CPU only"."""
    driver: str | None
    """The version of NVIDIA's kernel driver, or None."""
    compiler: str | None
    """The path of a C compiler, which Triton needs for its launchers, or None."""
    taken: tuple[Taken, ...]
    extras: tuple[Extra, ...]

    @classmethod
    def here(cls) -> Diagnosis:
        """Examine this machine."""
        devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        taken = tuple(one for device in devices for one in _taken(device))
        return cls(Machine.here(), _build(), _driver(), _compiler(), taken, tuple(_extras()))

    @property
    def paragraph(self) -> str:
        """A summary in one paragraph, for reports."""
        machine = self.machine
        forward = dict.fromkeys((one.device, one.dtype, one.family, one.forward) for one in self.taken)
        runs = "; ".join(f"{family} on {device} in {dtype}: {name or 'none'}" for device, dtype, family, name in forward)
        missing = ", ".join(one.name for one in self.extras if one.missing) or "none"
        return (
            f"penstock {machine.penstock}, torch {machine.torch} ({self.build}), triton {machine.triton or 'not installed'}, "
            f"Python {machine.python}, {machine.system}. Processor: {machine.processor}, {machine.cores} cores, {machine.instructions}. "
            f"GPUs: {'; '.join(machine.gpus) or 'none'}; driver {self.driver or 'not found'}; C compiler {self.compiler or 'not found'}. "
            f"Implementations: {runs}. Incomplete extras: {missing}."
        )


def _taken(device: str) -> Iterable[Taken]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    alike: dict[tuple[Any, ...], list[str]] = {}
    for family in families():
        for variant in family.variants:
            found = _explained(family, variant, dtype, device)
            reasons: dict[str, str] = {}
            for one in found.verdicts:
                if one.reason is not None:
                    reasons.setdefault(one.name, one.reason.removeprefix("refuses: "))
            refused = tuple((name, reason) for name, reason in reasons.items() if name != found.forward)
            forms = tuple(dict.fromkeys(one.name for listed in found.forms.values() for one in listed if one.reason is None))
            alike.setdefault((family.name, found.forward, found.backward, forms, refused), []).append(variant)
    for (name, *rest), functions in alike.items():
        yield Taken(name, device, str(dtype).removeprefix("torch."), tuple(functions), *rest)


def _explained(family: Registered, variant: str, dtype: torch.dtype, device: str) -> Explanation:
    if family.draw is not None:
        return inputs(variant, SHAPE, dtype, device).with_gradients().explained()
    sizes = dict.fromkeys(family.trials[0].sizes, SHAPE.T) | {"B": SHAPE.B, "H": SHAPE.H, "G": SHAPE.H}
    given = {
        one.public: torch.zeros([sizes[axis] for axis, _ in one.letters], dtype=dtype, device=device, requires_grad=True)
        for one in family.trials[0].operator.signatures[variant].arguments
        if one.required
    }
    return explain(variant, **given)


def _build() -> str:
    cuda, hip = torch.version.cuda, torch.version.hip
    return f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"


def _driver() -> str | None:
    place = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module.*?([0-9]+\.[0-9.]+)", place.read_text("utf-8")) if place.exists() else None
    return None if found is None else found[1]


def _compiler() -> str | None:
    named = os.environ.get("CC")
    return next(filter(None, map(shutil.which, ([named] if named else []) + ["gcc", "clang"])), None)


def _extras() -> Iterable[Extra]:
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return
    listed: dict[str, list[str]] = {}
    for line in lines:
        if found := re.search(r"""extra == ['"]([^'"]+)['"]""", line):
            listed.setdefault(found[1], []).append(line.partition(";")[0])
    for name in sorted(set(listed) - set(DEVELOPMENT)):
        yield Extra(name, tuple(sorted(one for one in _packages(name, listed) if installed(one) is None)))


def _packages(extra: str, listed: dict[str, list[str]]) -> set[str]:
    """The packages of an extra and of those that it includes."""
    found: set[str] = set()
    for line in listed.get(extra, ()):
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[([^\]]*)\])?", line.strip())
        assert match is not None
        if match[1] == DISTRIBUTION:
            found |= {one for part in match[2].split(",") for one in _packages(part.strip(), listed)}
        else:
            found.add(match[1])
    return found
