"""Options of raw inputs that no operator sees, or that a variant does not have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import Complaints, DtypeError, InvalidArgument, RangeError, described, shortened
from .variants import VARIANTS, Variant


def gates(row: Variant, g: Tensor | None, A_log: Tensor | None, raw_decay: bool) -> tuple[Tensor | None, Tensor | None]:
    """The log decay and the raw gate, of which one is None."""
    return (None, g) if raw_decay or (A_log is not None and row.raw == "softplus") else (g, None)


def checked_gates(
    function: str, variant: str, gate: Tensor | None, A_log: Tensor | None, raw_decay: bool, flags: tuple[Any, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """``gates`` of a function that takes the name of a variant; raises for options that the variant does not have."""
    name, row = f"{function}({variant!r})", VARIANTS[variant]
    if raw_decay is not False:
        check_flag(name, "raw_decay", raw_decay)
        if row.raw != "sigmoid":
            _refuse(name, "raw_decay", f"False for {variant}", "True", "Raw gates of other variants have A_log.")
    g, raw = gates(row, gate, A_log, raw_decay)
    if any(x is not None and x is not False for x in flags):
        check_options(name, row, flags, raw)
    return g, raw


def check_flag(function: str, name: str, value: object) -> None:
    """Raise unless a flag that no operator sees is True or False."""
    if not isinstance(value, bool):
        _refuse(function, name, "True or False", described(value), "", DtypeError)


def check_options(function: str, row: Variant, flags: tuple[Any, ...], raw: Tensor | None) -> None:
    """Raise for options that a variant does not have. The operator checks types and values."""
    complaints = Complaints(function)
    _, beta_logits, allow_neg_eigval, lower_bound = flags
    if row.streams == 2:
        for name, value in zip(("use_qk_l2norm", "beta_logits", "allow_neg_eigval"), flags):
            if value is not False:
                complaints.add(RangeError, name, f"False for {row.name}, which has no beta", shortened(value))
    elif allow_neg_eigval is True and beta_logits is False:
        complaints.add(RangeError, "allow_neg_eigval", "False without beta_logits", "True", "It doubles the sigmoid of beta_logits.")
    if lower_bound is not None:
        _check_bound(complaints, row, lower_bound, raw)
    complaints.raise_any()


def _check_bound(complaints: Complaints, row: Variant, bound: Any, raw: Tensor | None) -> None:
    """``lower_bound`` is part of a raw gate of kda, or what a caller knows of the log decays of two streams."""
    rule = remedy = ""
    if row.bounded and raw is None:
        rule, remedy = "None without A_log", "It bounds a raw gate: pass A_log, too; of zeros for lower_bound * sigmoid(x + dt_bias)."
    elif not row.bounded and row.streams == 1:
        rule, remedy = f"None for {row.name}", "Only kda, rwkv7 and dplr have it."
    elif row.streams == 2 and raw is not None:
        rule, remedy = "None with raw_decay", "The bound of a raw gate of rwkv7 is known."
    if rule:
        complaints.add(RangeError, "lower_bound", rule, shortened(bound), remedy)


def _refuse(function: str, name: str, rule: str, value: str, remedy: str, kind: type[InvalidArgument] = RangeError) -> None:
    complaints = Complaints(function)
    complaints.add(kind, name, rule, value, remedy)
    complaints.raise_any()
