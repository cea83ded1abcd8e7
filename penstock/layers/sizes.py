"""Checks of the values of configurations."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from typing import Any

import torch

from ..errors import Complaints, DtypeError, RangeError, described, shortened


def check_whole(complaints: Complaints, name: str, value: object, least: int) -> None:
    """Check a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        complaints.add(DtypeError, name, "a whole number", described(value))
    elif value < least:
        complaints.add(RangeError, name, f"a whole number of at least {least}", shortened(value))
    elif value >= 2**63:
        complaints.add(RangeError, name, "a whole number below 2^63", shortened(value))


def check_number(complaints: Complaints, name: str, value: object, signed: bool = False) -> None:
    """Check a finite number, of at least 0 unless it is ``signed``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        complaints.add(DtypeError, name, "a number", described(value))
    elif not (-sys.float_info.max if signed else 0) <= value <= sys.float_info.max:  # holds for integers of any size
        complaints.add(RangeError, name, f"a finite number{'' if signed else ' of at least 0'}", shortened(value))


def check_fields(complaints: Complaints, config: Any) -> None:
    """Check the fields of a dataclass that are whole numbers, numbers or bools, by their annotations.

    Whole numbers are at least 1, or 0 if that is the default. Numbers are finite and, unless ``metadata["signed"]``, at least 0.
    """
    for field in fields(config):
        value, kind, *others = getattr(config, field.name), *str(field.type).split(" | ")
        if value is None and others == ["None"]:
            continue
        if kind == "int":
            check_whole(complaints, field.name, value, 1 if field.default in (MISSING, None) else min(1, field.default))
        elif kind == "float":
            check_number(complaints, field.name, value, field.metadata.get("signed", False))
        elif kind == "bool" and not isinstance(value, bool):
            complaints.add(DtypeError, field.name, "True or False", described(value))
