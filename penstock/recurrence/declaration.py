"""The declaration of the recurrence for the frame (``penstock.call``): two operators, over sequences and in place, a signature per variant.

Axes are those of ``tokens/problem.py``.
"""

from __future__ import annotations

from torch import Tensor

from ..call.declaration import Argument, Signature, Sizes
from ..call.implementation import Mode
from ..tokens import declaration as tokens
from ..tokens.packing import cu_seqlens, one_row
from ..tokens.pools import POOL, SLOTS, own_row
from ..tokens.problem import InPlace, OverSequences, TokenProblem
from ..tokens.sharing import groups
from .variants import VARIANTS, Variant


class Tokens(TokenProblem):
    """The problem that both operators share."""

    u: Tensor | None  # [H, K]

    @property
    def variant(self) -> Variant:
        """The row of the table."""
        return self.signature.about  # type: ignore[no-any-return]


class Recurrence(Tokens, OverSequences):
    """A call over whole sequences."""


class Advance(Tokens, InPlace):
    """A call that updates states in place. ``operators.py`` sets ``sequences``."""


def refuses_row(p: Tokens, mode: Mode) -> str | None:
    """Why no implementation computes a problem whose bonus is not that of its row, or None."""
    if p.variant.bonus == (p.u is not None):
        return None
    return f"{p.variant.name} has a bonus, and u is missing" if p.variant.bonus else f"{p.variant.name} has no bonus, and there is a u"


def refuses_bonus(p: Tokens, mode: Mode) -> str | None:
    """``refuses_row``, or why an implementation that reads the previous state only with a bonus cannot compute a problem."""
    if p.variant.read == "previous" and not p.variant.bonus:
        return f"it reads the previous state only with a bonus, {p.variant.name} has none"
    return refuses_row(p, mode)


def _tokens(row: Variant, query: str, gate: str, nullable: bool) -> tuple[Argument, ...]:
    """The arguments that both operators share."""
    return (
        *tokens.queries_keys_values(query),
        tokens.decay(" ".join(row.decay), gate, nullable, row.name == "retention", lambda x: _other_variants(row, x.dim())),
        Argument(
            "u", "H K" if row.bonus else "", nullable=nullable, gradient=True, absent="" if row.bonus else "this variant has no bonus",
            hint="A bonus has the heads of v.",
        ),
        cu_seqlens("T", "N sequences have N + 1 offsets."),
    )  # fmt: skip


def _other_variants(row: Variant, axes: int) -> str:
    """A hint for a decay of a wrong shape, whose axes may fit another variant."""
    if axes == len(row.decay):
        return "A decay has the heads of v."
    others = [other.name for other in VARIANTS.values() if other.read == row.read and len(other.decay) == axes and other is not row]
    return f"A decay of {axes} axes belongs to {' or '.join(others)}." if others else ""


def over_sequences(row: Variant) -> Signature:
    """The signature of a variant's function over whole sequences."""
    arguments, rules = (*_tokens(row, row.query, row.gate, False), tokens.INITIAL_STATE), (one_row, groups(row.query))
    return Signature(row.name, arguments, row, rules=rules, layout=("T", "H"), **tokens.AXES)


def in_place(row: Variant, function: str) -> Signature:
    """The signature of ``advance`` or ``decode_step`` for a variant."""
    arguments = (*_tokens(row, "", "", True), SLOTS, POOL)
    return Signature(f"{function}({row.name!r})", arguments, row, rules=(one_row, groups("q"), own_row), **tokens.AXES)


def _scale(sizes: Sizes, row: Variant) -> float:
    return row.scale if row.scale is not None else sizes["K"] ** -0.5


OPTIONS = (tokens.scale(_scale), tokens.REVERSE, tokens.OUTPUT_FINAL_STATE)
ADVANCE_OPTIONS = OPTIONS[:1]
RESULTS = (tokens.OUTPUT, tokens.FINAL_STATE)
