"""The exceptions of Penstock, and the one way in which their messages are written.

::

    PenstockError
    ├── InvalidArgument (ValueError)      several rules of different kinds broken, or a kind not listed below
    │   ├── ShapeError                    a size, or the number of axes
    │   ├── DtypeError (TypeError)        a dtype, or something that is no tensor, number or bool where one belongs
    │   ├── DeviceError                   tensors on different devices
    │   └── RangeError                    a value: a positive decay, cu_seqlens that do not fit, an unknown name
    └── ImplementationRefused (RuntimeError)   no implementation takes this call, or the named one does not

A message reads ``<function>: <argument> must be <rule>, got <value>. <what to do>.`` and lists every broken rule.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field


class PenstockError(Exception):
    """Base of every exception that Penstock raises on purpose."""


class InvalidArgument(PenstockError, ValueError):
    """An argument breaks a rule of the function it was given to."""


class ShapeError(InvalidArgument):
    """A tensor has the wrong number of axes, or an axis the wrong size."""


class DtypeError(InvalidArgument, TypeError):
    """An argument has the wrong dtype, or is of the wrong Python type."""


class DeviceError(InvalidArgument):
    """The tensors of one call lie on different devices."""


class RangeError(InvalidArgument):
    """A value lies outside the range its argument allows."""


class ImplementationRefused(PenstockError, RuntimeError):
    """The named implementation cannot take this call, or, with ``impl="auto"``, none can."""


@dataclass
class Complaints:
    """Collects every broken rule of one call, then raises them together.

    >>> complaints = Complaints("gla")
    >>> complaints.add(ShapeError, "g", "of shape [B,T,H,K] = [1, 8, 2, 4]", "[1, 8, 2]", "Did you mean simple_gla?")
    >>> complaints.raise_any()
    Traceback (most recent call last):
    penstock.errors.ShapeError: gla: g must be of shape [B,T,H,K] = [1, 8, 2, 4], got [1, 8, 2]. Did you mean simple_gla?
    """

    function: str
    found: list[tuple[type[InvalidArgument], str]] = field(default_factory=list)

    def add(self, kind: type[InvalidArgument], argument: str, rule: str, value: object, remedy: str = "") -> None:
        """Note that ``argument`` breaks ``rule``; ``remedy`` is a whole sentence."""
        self.found.append((kind, f"{self.function}: {argument} must be {rule}, got {value}.{' ' + remedy if remedy else ''}"))

    def raise_any(self) -> None:
        """Raise what was noted: as its own kind if all are of one kind, else as InvalidArgument."""
        if self.found:
            kinds = {kind for kind, _ in self.found}
            raise (kinds.pop() if len(kinds) == 1 else InvalidArgument)("\n".join(text for _, text in self.found))


def described(value: object) -> str:
    """A value of the wrong type, in a few words."""
    return "None" if value is None else f"{shortened(value)} of type {type(value).__name__}"


def shortened(value: object, length: int = 60) -> str:
    """A value in at most so many characters, however large it is."""
    text = _repr.repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxother, _repr.maxstring = 3, 60, 60
