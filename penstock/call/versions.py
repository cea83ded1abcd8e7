"""Versions of torch and Triton whose private names were checked. ``docs/versions.md`` has the table.

A version newer than all of them warns once, and the public names are used instead.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module

NEWEST = {"torch": (2, 14), "triton": (3, 9)}
"""The newest versions whose private names were checked."""


def version(package: str) -> tuple[int, int]:
    """Major and minor version of an installed package."""
    major, minor = import_module(package).__version__.split(".")[:2]
    return int(major), int(minor)


@cache
def checked(package: str) -> bool:
    """Whether private names of this package may be used. Warns, once, if it is newer than the versions in which they were checked."""
    found, newest = version(package), NEWEST[package]
    if found > newest:
        numbers = [".".join(map(str, one)) for one in (found, newest)]
        warnings.warn(
            f"penstock: {package} {numbers[0]} is newer than {numbers[1]}, the newest version that this penstock knows. Its private names "
            "are not used: results stay the same, calls are slower. Use a newer penstock, or see docs/versions.md.",
            stacklevel=2,
        )
    return found <= newest
