"""The exceptions of Penstock and the format of their messages.

::

    PenstockError
    ├── InvalidArgument (ValueError)      several broken rules of different kinds
    │   ├── ShapeError                    a size, or the number of axes
    │   ├── DtypeError (TypeError)        a wrong dtype or Python type
    │   ├── DeviceError                   tensors on different devices, or a device that torch cannot use
    │   └── RangeError                    a wrong value: a positive decay, inconsistent cu_seqlens, an unknown name
    ├── ImplementationRefused (RuntimeError)   no implementation, or not the named one, takes this call
    ├── MissingExtra (ImportError)        an optional package is needed and not installed
    ├── ExchangeError (RuntimeError)      the ranks of a process group could not exchange tensors
    └── EngineError (RuntimeError)        a request that the engine could not finish
        ├── QueueFull                     too many requests wait
        └── OutOfMemory                   a step, or the states of an engine, did not fit into memory

    PenstockWarning (UserWarning)         a call that runs as it is written, and may not be what is meant

A message has the form ``<function>: <argument> must be <rule>, got <value>. <what to do>.`` and lists every broken rule.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

DISTRIBUTION = "penstock-lm"
"""The name of the distribution in ``pyproject.toml``; the package is ``penstock``."""


def installing(extra: str) -> str:
    """The commands that install the packages of an extra. The second adds them to an installed package, without an index that has it.

    >>> installing("models")
    "pip install -e '.[models]' in a checkout, or pip install 'penstock-lm[models]' with a wheel installed"
    """
    return f"pip install -e '.[{extra}]' in a checkout, or pip install '{DISTRIBUTION}[{extra}]' with a wheel installed"


class PenstockError(Exception):
    """Base of every exception that Penstock raises on purpose."""


class InvalidArgument(PenstockError, ValueError):
    """An argument breaks a rule of its function."""

    complaints: tuple[Complaint, ...] = ()
    """The broken rules one by one, if ``Complaints`` raised this."""

    def of(
        self, function: str, names: Mapping[str, str], left_out: Collection[str] = (), swapped: Mapping[str, tuple[int, int]] | None = None
    ) -> InvalidArgument:
        """The error of a function that passed its arguments on to the one that raised this. Complaints of its own stay.

        names : mapping
            What it calls the arguments that have other names there.
        left_out : collection of str
            Arguments (names there) that its caller left out. Complaints about the defaults that it passed in their place are dropped.
        swapped : mapping, optional
            Pairs of axes that it swapped, by the argument (names there). Shapes are shown as its caller passed them.

        >>> complaints = Complaints("gla")
        >>> complaints.add(DtypeError, "g", "float32", "float16", "Convert it with g.to(...).")
        >>> try:
        ...     complaints.raise_any()
        ... except InvalidArgument as error:
        ...     print(error.of("fused_recurrent_gla", {"g": "gk"}))
        fused_recurrent_gla: gk must be float32, got float16. Convert it with gk.to(...).
        """
        kept = [one for one in self.complaints if one.function == function or one.argument not in left_out or one.value == "None"]
        found = [one if one.function == function else one.of(function, names, swapped or {}) for one in kept or self.complaints]
        return Complaints(function, found).error if found else self


class ShapeError(InvalidArgument):
    """A tensor has the wrong number of axes, or an axis the wrong size."""


class DtypeError(InvalidArgument, TypeError):
    """An argument has the wrong dtype, or is of the wrong Python type."""


class DeviceError(InvalidArgument):
    """The tensors of one call are on different devices, or torch cannot use a device."""


class RangeError(InvalidArgument):
    """A value is outside the allowed range of its argument."""


class ImplementationRefused(PenstockError, RuntimeError):
    """The named implementation refuses this call or, with ``impl="auto"``, all implementations do."""


class MissingExtra(PenstockError, ImportError):
    """An optional package is needed and not installed."""

    @classmethod
    def of(cls, function: str, package: str, extra: str) -> MissingExtra:
        """The error for a package that belongs to an extra.

        >>> print(MissingExtra.of("load", "safetensors", "models"))  # doctest: +ELLIPSIS
        load: safetensors must be installed, got none. Run pip install -e '.[models]' in a checkout, or ...
        """
        return cls(f"{function}: {package} must be installed, got none. Run {installing(extra)}.")


class ExchangeError(PenstockError, RuntimeError):
    """The ranks of a process group could not exchange tensors."""


class PenstockWarning(UserWarning):
    """A call runs as it is written, and may not be what is meant."""


class EngineError(PenstockError, RuntimeError):
    """A request that the engine could not finish."""


class QueueFull(EngineError):
    """Too many requests wait."""


class OutOfMemory(EngineError):
    """A step, or the states of an engine, did not fit into memory."""


class Complaint(NamedTuple):
    """A broken rule."""

    kind: type[InvalidArgument]
    function: str
    argument: str
    rule: str
    value: str
    remedy: str

    def __str__(self) -> str:
        remedy = f" {self.remedy}" if self.remedy else ""
        return f"{self.function}: {self.argument} must be {self.rule}, got {self.value}.{remedy}"

    def of(self, function: str, names: Mapping[str, str], swapped: Mapping[str, tuple[int, int]]) -> Complaint:
        """The same for the caller of another function: see ``InvalidArgument.of``."""
        rule, value, axes = self.rule, self.value, swapped.get(self.argument)
        if axes is not None and self.kind is ShapeError:
            rule, value = _with_axes_swapped(rule, axes), _with_axes_swapped(value, axes)
        argument = names.get(self.argument, self.argument)
        return Complaint(self.kind, function, argument, _renamed(rule, names), value, _renamed(self.remedy, names))


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """A rule or a remedy with other names of arguments. The article in "a tensor" is not the argument a: no such word follows a name."""
    if not names:
        return text
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.'\"])({known})(?=[.,;:)=]| (?:is|has|and|or|of)\b|$)", lambda found: names[found[1]], text)


def _with_axes_swapped(text: str, axes: tuple[int, int]) -> str:
    """A text with two axes of every shape in it swapped, of shapes that have both.

    >>> _with_axes_swapped("of shape [N,H,K,V] = [1, 2, 8, 6]", (-2, -1))
    'of shape [N,H,V,K] = [1, 2, 6, 8]'
    """

    def swap(found: re.Match[str]) -> str:
        comma = ", " if ", " in found[1] else ","
        sizes, (i, j) = found[1].split(comma), axes
        if all(-len(sizes) <= axis < len(sizes) for axis in axes):
            sizes[i], sizes[j] = sizes[j], sizes[i]
        return f"[{comma.join(sizes)}]"

    return re.sub(r"\[([^][]*)\]", swap, text)


@dataclass
class Complaints:
    """Collects the broken rules of one call and raises them together.

    >>> complaints = Complaints("gla")
    >>> complaints.add(ShapeError, "g", "of shape [B,T,H,K] = [1, 8, 2, 4]", "[1, 8, 2]", "Did you mean simple_gla?")
    >>> complaints.raise_any()
    Traceback (most recent call last):
    penstock.errors.ShapeError: gla: g must be of shape [B,T,H,K] = [1, 8, 2, 4], got [1, 8, 2]. Did you mean simple_gla?
    """

    function: str
    found: list[Complaint] = field(default_factory=list)

    def add(self, kind: type[InvalidArgument], argument: str, rule: str, value: object, remedy: str = "") -> None:
        """Add a broken rule of ``argument``; ``remedy`` is a whole sentence."""
        self.found.append(Complaint(kind, self.function, argument, rule, str(value), remedy))

    def raise_any(self) -> None:
        """Raise the broken rules, if there are any."""
        if self.found:
            raise self.error

    @property
    def error(self) -> InvalidArgument:
        """The broken rules as an exception: of their own kind if all have the same kind, otherwise InvalidArgument."""
        kinds = {one.kind for one in self.found}
        error = (kinds.pop() if len(kinds) == 1 else InvalidArgument)("\n".join([str(one) for one in self.found]))
        error.complaints = tuple(self.found)
        return error


def described(value: object) -> str:
    """A value and its type, for messages about wrong types."""
    return "None" if value is None else f"{shortened(value)} of type {type(value).__name__}"


def shortened(value: object, length: int = 60) -> str:
    """A value in at most ``length`` characters."""
    text = re.sub(r"\n\s*", " ", _repr.repr(value))
    return text if len(text) <= length else text[: length - 3] + "..."


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxother, _repr.maxstring = 3, 60, 60
