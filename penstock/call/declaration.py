"""How an operator is declared: its arguments, options and results.

Axes are written as in papers, ``"B T H K"``. The first argument with an axis sets its size, all later ones must agree; ``N+1`` is one more
than N. From a declaration follow validation (``validation``), torch's operators (``operator``), and the fast path (``memory``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import Complaints

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)

Sizes = Mapping[str, int]
"""Sizes by axis."""


class Wrong(NamedTuple):
    """Values that an argument must not have."""

    rule: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Argument:
    """A tensor that a call takes."""

    name: str
    """In the operator's schema, and as an attribute of a ``Problem``."""
    axes: str
    dtypes: tuple[torch.dtype, ...] = FLOATS
    like: str = ""
    """The argument whose dtype it shares."""
    label: str = ""
    """Its name in messages, if another."""
    required: bool = True
    nullable: bool = False
    """Whether a missing one is an error of shape, not of type: where the public function has None as its default."""
    absent: str = ""
    """Why this signature does not have it. It must then be None."""
    gradient: bool = False
    written: bool = False
    """Whether it is updated in place."""
    values: Callable[[Tensor, Sizes], Wrong | None] | None = None
    """Looks at the values, after shapes and dtypes were found right."""
    draw: Callable[[Tensor], Tensor] | None = None
    """From normal to allowed values, for what draws inputs from a declaration; None where any will do."""
    otherwise: tuple[str, str] | None = None
    """(axis, other): where the argument is None, ``axis`` has the size of ``other``."""
    hint: str | Callable[[Tensor], str] = ""
    """What to do about a wrong shape."""
    letters: tuple[tuple[str, int], ...] = field(init=False, repr=False)
    """Each axis, and how much longer than it the tensor is."""

    def __post_init__(self) -> None:
        pairs = [axis.partition("+") for axis in self.axes.split()]
        object.__setattr__(self, "letters", tuple([(axis, int(more or 0)) for axis, _, more in pairs]))

    @property
    def public(self) -> str:
        """Its name in messages."""
        return self.label or self.name


@dataclass(frozen=True)
class Option:
    """A number, flag or name that a call takes."""

    name: str
    kind: Literal["bool", "int", "float"]
    optional: bool = False
    """Whether None is allowed."""
    values: Callable[[Any], Wrong | None] | None = None
    resolve: Callable[[Any, Sizes, Any], Any] | None = None
    """What implementations see, from what was given, the sizes, and what the signature is about."""

    def plain(self, value: Any) -> Any:
        """The value as a number of Python's; those of other libraries are not in torch's schemas."""
        if value is None or isinstance(value, (torch.SymInt, torch.SymFloat)) or self.kind == "bool":
            return value
        return float(value) if self.kind == "float" else int(value)

    @property
    def schema(self) -> str:
        """As in the schema of the operator."""
        return f"{self.kind}{'?' * self.optional} {self.name}"


@dataclass(frozen=True)
class Result:
    """A tensor that a call returns, contiguous and new."""

    name: str
    axes: str
    dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    """From the dtype of the first argument."""
    wanted: str = ""
    """The option that asks for it; without one it is always returned."""
    saved: bool = False
    """Whether the backward pass takes it."""


@dataclass(frozen=True)
class Signature:
    """One public function of an operator: the same arguments in the same order as its others, with their own axes and names."""

    function: str
    """As messages name it."""
    arguments: tuple[Argument, ...]
    about: Any = None
    """What implementations need to know of it."""
    nonempty: str = ""
    """Axes of at least 1."""
    counts: str = ""
    """Axes that count tokens or sequences, the first axes of their arguments: calls that differ in nothing else share their plans
    (``memory``)."""
    folded: str = ""
    """Axes that independent copies of a call can be laid along, which is how ``torch.vmap`` is served."""
    rules: tuple[Callable[[Complaints, Mapping[str, Tensor | None], Sizes], None], ...] = ()
    """Rules between arguments: of those whose own rules hold, None for those not given."""

    counted: tuple[tuple[tuple[str, int], ...], ...] = field(init=False, repr=False)
    """Of each argument, the axes that count, and how much longer than these it is."""
    written: int = field(init=False, repr=False)
    """The place of the argument that is updated in place; -1 if there is none."""

    def __post_init__(self) -> None:
        counts = self.counts.split()
        counted = [tuple([(axis, more) for axis, more in one.letters if axis in counts]) for one in self.arguments]
        for one, axes in zip(self.arguments, counted):
            assert one.letters[: len(axes)] == axes, f"{self.function}: axes that count must come first in {one.name}"
        object.__setattr__(self, "counted", tuple(counted))
        written = [place for place, one in enumerate(self.arguments) if one.written]
        object.__setattr__(self, "written", written[0] if written else -1)
