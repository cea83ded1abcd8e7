"""The kinds of mixers by name: those of this package, those of users, and those of other packages.

A package declares its configurations under ``[project.entry-points."penstock.mixers"]`` of its pyproject.toml, as ``kind =
"package.module:Config"``. The module is imported when a model of this kind is loaded or saved.
"""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from importlib.metadata import entry_points
from typing import TypeVar

from ..errors import Complaints, DtypeError, RangeError, described, shortened
from .mixer import MixerConfig

GROUP = "penstock.mixers"
CONFIGS: dict[str, type[MixerConfig]] = {}
"""The configurations of all registered mixers and channel mixers by the name of their kind."""
Registered = TypeVar("Registered", bound=type[MixerConfig])


def register(config: Registered) -> Registered:
    """Make a configuration of a mixer known by its ``kind``, so that models with it can be loaded. Also a decorator.

    config : type
        A subclass of ``MixerConfig`` that is a frozen dataclass and has ``build`` and a ``kind`` that no other class has. A class that
        is defined again under the same name in the same module replaces the earlier one.

    Returns the class. Raises DtypeError or RangeError.
    """
    complaints = Complaints("register")
    if not (inspect.isclass(config) and issubclass(config, MixerConfig)):
        complaints.add(DtypeError, "config", "a subclass of MixerConfig", described(config))
        complaints.raise_any()
    kind, name = str(getattr(config, "kind", "")), config.__qualname__
    if not is_dataclass(config) or not config.__dict__.get("__dataclass_fields__") or not config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        complaints.add(DtypeError, "config", "a frozen dataclass", name, "Put @dataclass(frozen=True) before the class.")
    if config.build is MixerConfig.build:
        complaints.add(RangeError, "config", "a class with build", name, "Let it return a new mixer.")
    if not kind or not kind.isprintable():
        complaints.add(RangeError, "kind", "a printable text", shortened(kind), f"Set it in {name}.")
    elif kind in CONFIGS and _place(CONFIGS[kind]) != _place(config):
        other = ".".join(_place(CONFIGS[kind]))
        complaints.add(RangeError, "kind", "one that no other mixer has", f"{kind!r}, that of {other}", f"Set another one in {name}.")
    complaints.raise_any()
    CONFIGS[kind] = config
    return config


def find(kind: str) -> type[MixerConfig] | None:
    """The configuration of a kind, None if it is unknown. Raises RangeError if the package that declares it cannot be imported."""
    for entry in () if kind in CONFIGS else entry_points(group=GROUP, name=kind):
        complaints = Complaints("register")
        try:
            found = register(entry.load())
        except (ImportError, AttributeError) as error:
            value = f"{entry.value} ({type(error).__name__}: {error})"
            complaints.add(RangeError, f"{GROUP} {kind!r}", "an entry point that can be imported", value)
            complaints.raise_any()
            raise
        if found.kind != kind:
            value = f"{entry.value} of kind {found.kind!r}"
            complaints.add(RangeError, f"{GROUP} {kind!r}", "the entry point of a class of this kind", value)
            complaints.raise_any()
    return CONFIGS.get(kind)


def is_registered(config: MixerConfig) -> bool:
    """Whether a configuration can be found by its kind."""
    found = find(config.kind)
    return found is not None and _place(found) == _place(type(config))


def _place(config: type) -> tuple[str, str]:
    return config.__module__, config.__qualname__
