"""The families of operators: what tools know of each. A family registers itself when it is imported, so nothing above names it.

``explain``, ``penstock check``, benchmarks and the contract tests loop over the registered families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..errors import Complaints, RangeError, described, shortened
from .declaration import Signature
from .derivatives import Tensors
from .dispatch import Family
from .operator import Operator


@dataclass(frozen=True)
class Trial:
    """An operator, and the call on which its implementations are compared with the oracle.

    The call should have more tokens than a chunk, and sizes that no block divides. The oracle is the implementation named "reference".
    """

    operator: Operator[Any]
    sizes: Mapping[str, int]
    """Sizes by axis."""
    options: tuple[Any, ...] = ()
    indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Values of arguments that are indices. Others that are not floating-point are left out."""
    common: Mapping[str, int] = field(default_factory=dict)
    """Sizes of real models, for implementations that refuse other ones."""
    budget: Mapping[torch.dtype, float] | None = None
    """Allowed error by dtype of the inputs; None if sums are float32, or float64 for float64 inputs, and results are rounded once."""
    omitted: tuple[str, ...] = ()
    """Arguments that are left out: some exclude each other."""
    rounded: Callable[[int], Sequence[Callable[[Any], Tensors]]] | None = None
    """For implementations that round operands of products to a number of bits: the operator in float64 with such operands, in several
    draws of the rounding. An operator in place returns its output and updates the written argument."""

    def signatures(self) -> list[Signature]:
        """One signature for each variant; aliases are left out."""
        return list({str(one.about): one for one in self.operator.signatures.values()}.values())


@dataclass(frozen=True)
class Registered:
    """A family of operators that share their implementations."""

    name: str
    family: Family
    functions: Mapping[str, Callable[..., object]]
    """The public functions by name, in the order of messages."""
    trials: tuple[Trial, ...]
    """One for each operator. The first operator has a signature for every variant, by the name of its public function."""
    oracle: str
    """What the oracle is, in a few words."""
    by_variant: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions of the name of a variant and its tensors, by names that families share: updates of states in place, summaries. The public
    function of this name calls that of a variant's family, by name with what not all variants have."""
    draw: Callable[[str, Mapping[str, int], torch.Generator, str], dict[str, Tensor]] | None = None
    """Float64 arguments of a variant by name, with the distributions of real models, for benchmarks: from its name, sizes by axis, a
    generator and the name of a distribution of decays, or ""."""
    step: Callable[..., Tensor] | None = None
    """The public function for decode steps, if variants have one: of the variant's name, its drawn arguments in order (None for missing
    ones), ``state``, ``impl`` and, where benchmarks update rows of a pool, ``slots``. It returns the output."""
    loop: Callable[[str, Mapping[str, Tensor], float, Tensor | None], tuple[Tensor, Tensor]] | None = None
    """A token loop in float32, the baseline of benchmarks, if not that of ``bench/loop.py``: from a variant's name, its drawn arguments by
    name, the scale and the states [B,H,K,V], output and new states."""
    tables: Callable[[str], str] | None = None
    """For ``penstock check``: the tables of block sizes of its kernels for a GPU architecture, summarised in a line."""
    compiled: Callable[[str], Sequence[Any]] | None = None
    """For ``penstock check --compile``: the calls whose kernels are compiled ahead of time for a GPU architecture. Each has a ``name``, and
    ``planned(target)`` yields its passes and their plans (``gpu.plan.Planned``)."""
    tuning: Callable[[], Any] | None = None
    """For ``penstock tune``: how its block sizes are tuned, a ``tokens.tuning.Tuning``."""

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the public functions of the first operator."""
        return tuple(self.trials[0].operator.signatures)


_known: dict[str, Registered] = {}
_by_variant: dict[tuple[str, str], tuple[Callable[..., Any], frozenset[str]]] = {}
"""Functions of a variant that families share and the names of their arguments, by name and variant."""


def register(one: Registered) -> Registered:
    """Make a family known to all tools. Its name and the names of its functions must be new."""
    taken = [*_known, *functions()]
    if found := [name for name in (one.name, *one.functions) if name in taken]:
        complaints = Complaints("register")
        rule = "a family whose name and names of functions are new"
        complaints.add(RangeError, "one", rule, ", ".join(found), f"These are registered: {', '.join(taken)}.")
        complaints.raise_any()
    _known[one.name] = one
    for name, function in one.by_variant.items():
        taken_by = function, frozenset(signature(function).parameters)
        _by_variant.update({(name, variant): taken_by for variant in one.variants})
    return one


def families() -> tuple[Registered, ...]:
    """All families, in the order of their registration."""
    return tuple(_known.values())


def functions() -> dict[str, Registered]:
    """The family of each public function, by the function's name. Of names that families share, the first family."""
    found: dict[str, Registered] = {}
    for one in families():
        for name in (*one.functions, *one.by_variant):
            found.setdefault(name, one)
    return found


def by_variant(function: str, variant: object, given: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A variant's function of a name that families share, and its arguments among those ``given`` that not all variants have.

    Raises RangeError for other variants, and for given arguments that are neither None nor False and that the variant does not have.
    """
    if not isinstance(variant, str) or (function, variant) not in _by_variant:
        complaints = Complaints(function)
        known = [name for other, name in _by_variant if other == function]
        complaints.add(RangeError, "variant", f"one of {', '.join(known)}", shortened(variant))
        complaints.raise_any()
    run, names = _by_variant[function, variant]  # type: ignore[index]
    taken = {name: x for name, x in given.items() if x is not None and x is not False}
    if taken and not names.issuperset(taken):
        complaints = Complaints(f"{function}({variant!r})")
        known = [one for one in signature(run).parameters if one != "variant"]
        remedy = f"{variant} takes {', '.join(known)}: pass those after g by name."
        for name in taken:
            if name not in names:
                complaints.add(RangeError, name, f"left out for {variant}", described(taken[name]), remedy)
        complaints.raise_any()
    return run, taken


def variants(drawn: bool = False) -> tuple[str, ...]:
    """The variants of all families. ``drawn``: only those for which a family draws inputs."""
    return tuple(name for one in families() if one.draw is not None or not drawn for name in one.variants)


def trials() -> tuple[Trial, ...]:
    """The trials of all families."""
    return tuple(trial for one in families() for trial in one.trials)


def trial_of(operator: object) -> Trial:
    """The trial of an operator of a registered family."""
    return next(trial for trial in trials() if trial.operator is operator)
