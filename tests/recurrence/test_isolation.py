"""NaN and inf in one sequence, head or slot change no bit of outputs, states and gradients of the others."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import emulated
import pytest
import torch
from cases import ALL, AXES, NAMES, Case, draw, problem_of, upstream
from torch import Tensor

from penstock.call.implementation import Upstream
from penstock.recurrence.cuda import launch
from penstock.recurrence.operators import ADVANCE, FAMILY
from penstock.recurrence.variants import VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
"""NumPy's, under Triton's interpreter."""

VALUES = (torch.nan, torch.inf, -torch.inf)
TENSORS = ("q", "k", "v", "u", "initial_state", "output", "final_state")
"""Those that are poisoned; "output" and "final_state" are their gradients."""
SLOTS = torch.tensor([4, -1, 0, 2])
SICK = (("q", 0), ("k", 0), ("v", 0), ("q", 1), ("pool", 4), ("pool", 3))
"""Of decode steps: rows of sequences, one of them skipped, and of the pool, one of them in no sequence."""


@dataclass(frozen=True)
class Unit:
    """A part of a call that shares nothing with the rest: index ``sick`` of these axes, or a packed sequence."""

    axes: str
    sick: int
    lengths: tuple[int, ...] | None = None
    reverse: bool = False

    def split(self, axes: str, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Masks of the sick elements of a tensor and of the others, or None if its axes do not tell them apart."""
        sick = torch.zeros(x.shape, dtype=torch.bool)
        axis = next((axis for axis in axes if axis in self.axes), None)
        if axis is None:
            return None
        begin, end = self.sick, self.sick + 1
        if axis == "T":
            begin, end = sum(self.lengths[: self.sick]), sum(self.lengths[: self.sick + 1])
        sick.narrow(axes.index(axis), begin, end - begin)[:] = True
        return sick, ~sick

    def poisoned(self, axes: str, x: Tensor, value: float) -> Tensor:
        return x.masked_fill(self.split(axes, x)[0], value)


UNITS = {
    "batch row": Unit("BN", 1),
    "first head": Unit("H", 0),
    "last head": Unit("H", 1),
    "packed sequence": Unit("TN", 3, (5, 0, 17, 3)),  # chunks of the sequence before it reach into it
    "packed sequence, reversed": Unit("TN", 0, (5, 0, 17, 3), reverse=True),
}


def sample(impl: str, first: int, *factors: object) -> Iterator[tuple]:
    """The product of the factors; some of it for implementations that are slow here."""
    every = list(product(*factors))
    return iter(every if impl in NAMES else every[first::23])


def variants_of(impl: str) -> list[str]:
    return [name for name, row in VARIANTS.items() if impl != "cuda" or row.bonus]


def passes(impl: str, case: Case, tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Results of both passes, straight from the implementation."""
    implementation, problem = FAMILY.named(impl), problem_of(case, tensors)
    with torch.no_grad():
        results = implementation.forward(problem)
        gradients = implementation.gradients(problem, Upstream((tensors["output"], tensors["final_state"])))
    differentiable = [f"d{one.name}" for one in problem.signature.arguments if one.gradient]
    found = zip(("output", "final_state", *differentiable), (*results, *gradients))
    return {name: x for name, x in found if x is not None}


def step(impl: str, case: Case, tensors: dict[str, Tensor | None], pool: Tensor) -> Tensor:
    given = tensors | {"state": pool, "slots": SLOTS}
    problem = ADVANCE.checked(f"advance({case.variant!r})", [given.get(name) for name in ADVANCE.names], (None,))
    return FAMILY.named(impl).advance(problem)


def case_of(impl: str, **options: object) -> Case:
    """Heads of odd sizes, but for what has kernels for some sizes only."""
    K, V = (32, 32) if impl == "cuda" else (20, 12) if impl in NAMES else (16, 12)
    return Case("", H=2, K=K, V=V, **options)


QUICK = {"triton_recurrent": ("packed sequence",), "triton_chunkwise": ("packed sequence, reversed",)}
"""Interpreted kernels take a second a call: the other units are swept by the slow tests."""
EVERY = [pytest.param(impl, unit, marks=[pytest.mark.slow] * (unit not in QUICK.get(impl, UNITS))) for impl in ALL for unit in UNITS]


@pytest.mark.parametrize(("impl", "unit"), EVERY)
def test_passes(impl, unit, monkeypatch):
    monkeypatch.setattr(launch, "run", emulated.run)
    unit, first, healthy = UNITS[unit], list(UNITS).index(unit), {}
    of = case_of(impl, B=2, T=70 if impl in ("cpu", "chunkwise") else 10, lengths=unit.lengths, reverse=unit.reverse)
    for variant, name, value in sample(impl, first, variants_of(impl), TENSORS, VALUES):
        case = replace(of, variant=variant)
        axes = AXES | {"g": case.row.decay}
        tensors = draw(case) | dict(zip(("output", "final_state"), upstream(case)))
        if tensors[name] is None or unit.split(axes[name], tensors[name]) is None:
            continue
        if variant not in healthy:
            healthy[variant] = passes(impl, case, tensors)
        found = passes(impl, case, tensors | {name: unit.poisoned(axes[name], tensors[name], value)})
        for result, x in healthy[variant].items():
            parts = unit.split(axes[result.removeprefix("d")], x)
            if parts is not None:
                assert torch.equal(found[result][parts[1]], x[parts[1]]), (variant, name, value, result)
    assert healthy


@pytest.mark.parametrize("impl", [name for name in ALL if name != "triton_chunkwise"])
def test_updates_in_place(impl, monkeypatch):
    """In a sequence, in a row of the pool, and in a row that no sequence uses."""
    monkeypatch.setattr(launch, "run", emulated.run)
    for first, variant in enumerate(variants_of(impl)):
        case = replace(case_of(impl, B=4, T=2, state=False), variant=variant)
        tensors, before = draw(case), torch.randn(5, case.H, case.K, case.V)
        after = before.clone()
        output = step(impl, case, tensors, after)
        for (name, row), value in sample(impl, first, SICK, VALUES):
            poisoned = {name: None if x is None else x.clone() for name, x in (tensors | {"pool": before}).items()}
            poisoned[name][row] = value
            sick = row if name == "pool" else SLOTS[row]
            found = step(impl, case, poisoned, poisoned["pool"])
            others, rows = sick != SLOTS, torch.arange(5) != sick
            assert torch.equal(found[others], output[others]), (variant, name, row, value)
            assert torch.equal(poisoned["pool"][rows], after[rows]), (variant, name, row, value)
