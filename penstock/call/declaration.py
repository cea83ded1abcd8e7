"""Declarations of operators: arguments, options and results.

Axes are written as in papers, ``"B T H K"``. The first argument with an axis sets its size, later arguments must agree; ``N+1`` is one more
than N. Validation (``validation``), torch's operators (``registration``) and the fast path (``memory``) are derived from a declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import Complaints

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)

Sizes = Mapping[str, int]
"""Sizes by axis."""


Options = Mapping[str, Any]
"""Values of options by name."""


class Wrong(NamedTuple):
    """A rule that the values of an argument break."""

    rule: str
    found: str
    remedy: str = ""


Values: TypeAlias = Callable[[Tensor, Sizes, Options], Wrong | None]
"""A rule for the values of an argument."""


@dataclass(frozen=True)
class Argument:
    """A tensor argument."""

    name: str
    """The name in the operator's schema, and as an attribute of a ``Problem``."""
    axes: str
    dtypes: tuple[torch.dtype, ...] = FLOATS
    like: str = ""
    """The argument whose dtype it shares."""
    label: str = ""
    """Its name in messages, if different."""
    required: bool = True
    nullable: bool = False
    """Whether None is reported as a ShapeError, not as a DtypeError: the public function has None as its default. With ``required=False``,
    a rule of the signature reports it."""
    absent: str = ""
    """Why it must be None in this signature; empty if the signature has it."""
    gradient: bool = False
    written: bool = False
    """Whether it is updated in place."""
    values: Values | None = None
    """Checks the values, after shapes, dtypes and options."""
    draw: Callable[[Tensor], Tensor] | None = None
    """Maps normal values to allowed values, for tools that draw inputs; None if all values are allowed."""
    otherwise: tuple[str, str] | None = None
    """(axis, other): if the argument is None, ``axis`` has the size of ``other``."""
    derived: bool = False
    """Whether a public function may create it from the shapes of other arguments, so that its own shape confirms nothing."""
    hint: str | Callable[[Tensor, Sizes], str] = ""
    """Advice in messages about a wrong shape. A callable gets the known sizes, too."""
    letters: tuple[tuple[str, int], ...] = field(init=False, repr=False)
    """Each axis, and the number added to its size."""

    def __post_init__(self) -> None:
        pairs = [axis.partition("+") for axis in self.axes.split()]
        object.__setattr__(self, "letters", tuple([(axis, int(more or 0)) for axis, _, more in pairs]))

    @property
    def public(self) -> str:
        """Its name in messages."""
        return self.label or self.name


@dataclass(frozen=True)
class Option:
    """A number or flag that a call takes."""

    name: str
    kind: Literal["bool", "int", "float"]
    optional: bool = False
    """Whether None is allowed."""
    values: Callable[[Any], Wrong | None] | None = None
    resolve: Callable[[Any, Sizes, Any], Any] | None = None
    """Maps (given value, sizes, ``Signature.about``) to the value that implementations see."""

    def plain(self, value: Any) -> Any:
        """The value as a Python number. torch's schemas refuse numbers of other libraries."""
        if value is None or isinstance(value, (torch.SymInt, torch.SymFloat)) or self.kind == "bool":
            return value
        return float(value) if self.kind == "float" else int(value)

    @property
    def schema(self) -> str:
        """Its declaration in the schema of the operator."""
        return f"{self.kind}{'?' * self.optional} {self.name}"


@dataclass(frozen=True)
class Result:
    """A tensor that a call returns, contiguous and new."""

    name: str
    axes: str
    dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    """Its dtype, given the dtype of the first argument."""
    wanted: str = ""
    """The option that requests it; empty if it is always returned."""
    saved: bool = False
    """Whether the backward pass needs it."""


@dataclass(frozen=True)
class Signature:
    """One public function of an operator. Its signatures have the same arguments in the same order; axes and labels differ."""

    function: str
    """Its name in messages."""
    arguments: tuple[Argument, ...]
    about: Any = None
    """Data for the implementations, for example the row of a table of variants."""
    nonempty: str = ""
    """Axes whose size must be at least 1."""
    counts: str = ""
    """Axes that count tokens or sequences. They are the first axes of their arguments. Calls that differ only in these share plans
    (``memory``)."""
    folded: str = ""
    """Axes along which ``torch.vmap`` folds the mapped axis."""
    layout: tuple[str, str] | None = None
    """The axes of tokens and of heads, in this order in tensors; None if such calls always have few tokens."""
    rules: tuple[Callable[[Complaints, Mapping[str, Tensor | None], Sizes], None], ...] = ()
    """Rules between arguments. They get the tensors that pass their own rules, None for missing ones."""

    axes: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)
    """The axes of each argument, by its name."""
    counted: tuple[tuple[tuple[str, int], ...], ...] = field(init=False, repr=False)
    """For each argument, its axes in ``counts``, and the number added to their sizes."""
    written: int = field(init=False, repr=False)
    """The index of the argument that is updated in place, or -1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", {one.name: tuple(one.axes.split()) for one in self.arguments})
        counts = self.counts.split()
        counted = [tuple([(axis, more) for axis, more in one.letters if axis in counts]) for one in self.arguments]
        for one, axes in zip(self.arguments, counted):
            assert one.letters[: len(axes)] == axes, f"{self.function}: axes that count must come first in {one.name}"
        object.__setattr__(self, "counted", tuple(counted))
        written = [place for place, one in enumerate(self.arguments) if one.written]
        object.__setattr__(self, "written", written[0] if written else -1)
