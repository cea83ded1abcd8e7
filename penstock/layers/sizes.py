"""Checks of the values of configurations."""

from __future__ import annotations

import math
import sys
from dataclasses import MISSING, fields
from typing import Any

import torch

from ..errors import Complaints, DtypeError, RangeError, described, shortened


def check_whole(complaints: Complaints, name: str, value: object, least: int, most: int | None = None) -> None:
    """Check a whole number from ``least`` to ``most``. None: below 2**63."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        complaints.add(DtypeError, name, "a whole number", described(value))
    elif most is not None and not least <= value <= most:
        complaints.add(RangeError, name, f"a whole number from {least} to {most}", shortened(value))
    elif value < least:
        complaints.add(RangeError, name, f"a whole number of at least {least}", shortened(value))
    elif most is None and value >= 2**63:
        complaints.add(RangeError, name, "a whole number below 2^63", shortened(value))


def check_number(complaints: Complaints, name: str, value: object, lowest: float = 0.0, highest: float = math.inf) -> None:
    """Check a finite number from ``lowest`` to ``highest``, which may be infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        complaints.add(DtypeError, name, "a number", described(value))
    elif not (lowest <= value <= highest and abs(value) <= sys.float_info.max):  # works for integers of any size
        rule = "a finite number" if lowest == -math.inf else f"a finite number of at least {lowest:g}"
        rule = f"a number from {lowest:g} to {highest:g}" if math.isfinite(highest) else rule
        complaints.add(RangeError, name, rule, shortened(value))


def check_fields(complaints: Complaints, config: Any) -> None:
    """Check the fields of a dataclass that are whole numbers, numbers or bools, by their annotations.

    Whole numbers are at least 1, or 0 if that is the default or ``metadata["least"]``. Numbers are finite and, unless
    ``metadata["signed"]``, at least 0.
    """
    for field in fields(config):
        value, kind, *others = getattr(config, field.name), *str(field.type).split(" | ")
        if value is None and others == ["None"]:
            continue
        if kind == "int":
            least = 1 if field.default in (MISSING, None) else min(1, field.default)
            check_whole(complaints, field.name, value, field.metadata.get("least", least))
        elif kind == "float":
            check_number(complaints, field.name, value, -math.inf if field.metadata.get("signed") else 0.0)
        elif kind == "bool" and not isinstance(value, bool):
            complaints.add(DtypeError, field.name, "True or False", described(value))
