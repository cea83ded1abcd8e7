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
from collections.abc import Mapping
from dataclasses import dataclass, field

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

    def of(self, function: str, names: Mapping[str, str]) -> InvalidArgument:
        """The error of a function that passed its arguments on to the one that raised this. What names it already stays.

        names : mapping
            What it calls the arguments that have other names there.

        >>> print(RangeError("gla: g must be at most 0, got 1.").of("fused_recurrent_gla", {"g": "gk"}))
        fused_recurrent_gla: gk must be at most 0, got 1.
        """
        other = re.compile(rf"^(?!{function}:)\w+: (\w+) must", re.MULTILINE)
        return type(self)(other.sub(lambda found: f"{function}: {names.get(found[1], found[1])} must", str(self)))


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
    found: list[tuple[type[InvalidArgument], str]] = field(default_factory=list)

    def add(self, kind: type[InvalidArgument], argument: str, rule: str, value: object, remedy: str = "") -> None:
        """Add a broken rule of ``argument``; ``remedy`` is a whole sentence."""
        self.found.append((kind, f"{self.function}: {argument} must be {rule}, got {value}.{' ' + remedy if remedy else ''}"))

    def raise_any(self) -> None:
        """Raise the broken rules: as their own kind if all have the same kind, otherwise as InvalidArgument."""
        if self.found:
            kinds = {kind for kind, _ in self.found}
            raise (kinds.pop() if len(kinds) == 1 else InvalidArgument)("\n".join(text for _, text in self.found))


def described(value: object) -> str:
    """A value and its type, for messages about wrong types."""
    return "None" if value is None else f"{shortened(value)} of type {type(value).__name__}"


def shortened(value: object, length: int = 60) -> str:
    """A value in at most ``length`` characters."""
    text = re.sub(r"\n\s*", " ", _repr.repr(value))
    return text if len(text) <= length else text[: length - 3] + "..."


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxother, _repr.maxstring = 3, 60, 60
