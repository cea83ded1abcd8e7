"""The declaration of the recurrence for the frame (``penstock.call``): two operators, over sequences and in place, a signature per variant.

Axes are those of ``tokens/problem.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor
from typing_extensions import Self

from ..call.declaration import Argument, Option, Result, Signature, Sizes
from ..call.implementation import Mode
from ..tokens import declaration as tokens
from ..tokens.dtypes import state_dtype
from ..tokens.packing import cu_seqlens, one_row
from ..tokens.pools import POOL, SLOTS, own_row
from ..tokens.problem import InPlace, OverSequences, TokenProblem
from ..tokens.sharing import groups, over_groups, repeated
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


class Summary(Tokens, OverSequences):
    """What the tokens of each batch row do to a state. As the adjoint, k is q and v is the gradient of the output."""

    adjoint: bool
    u = None
    cu_seqlens = None

    @property
    def q(self) -> Tensor:  # type: ignore[override]
        """k, for what asks about sizes and strides of queries."""
        return self.k

    @cached_property
    def counts(self) -> dict[str, int]:
        """Batch rows are sequences."""
        counts = super().counts
        return counts | {"N": counts["B"]}

    @property
    def whole(self) -> Self:
        """The problem with k repeated for every head."""
        G, H = self.sizes["G"], self.sizes["H"]
        if G == H:
            return self
        whole = self.with_tensors({"k": repeated(self.k, H)})
        whole.sizes, whole.groups = {**self.sizes, "G": H}, G
        return whole

    def shared(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradient of k summed over the heads of each group."""
        first, *others = gradients
        return None if first is None else over_groups(first, self.sizes["G"], self.k.dtype), *others

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[B, H, K, V]"""
        B, H, K, V = (self.sizes[axis] for axis in "BHKV")
        return B, H, K, V


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
        tokens.decay(" ".join(row.decay), gate, nullable, row.name == "retention", lambda x, _: _other_variants(row, x.dim())),
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


def summed(row: Variant) -> Signature:
    """The signature of ``summary`` for a variant."""
    k, v = tokens.queries_keys_values()[1:]
    arguments = (
        replace(k, like=""),
        replace(v, like="k"),
        tokens.decay(" ".join(row.decay), "", True, row.name == "retention", lambda x, _: _other_variants(row, x.dim())),
        replace(tokens.INITIAL_STATE, axes="B H K V"),
    )
    axes = tokens.AXES | {"counts": "B T"}
    return Signature(f"summary({row.name!r})", arguments, row, rules=(groups("k"),), layout=("T", "H"), **axes)


def default_scale(sizes: Sizes, row: Variant) -> float:
    """The scale of a call that gives none."""
    return row.scale if row.scale is not None else sizes["K"] ** -0.5


OPTIONS = (tokens.scale(default_scale), tokens.REVERSE, tokens.OUTPUT_FINAL_STATE)
ADVANCE_OPTIONS = OPTIONS[:1]
RESULTS = (tokens.OUTPUT, tokens.FINAL_STATE)
SUMMARY_OPTIONS = (tokens.scale(lambda sizes, row: 1.0), tokens.REVERSE, Option("adjoint", "bool"))
SUMMARY_RESULTS = (Result("state", "B H K V", dtype=state_dtype), Result("decay", "B H K", dtype=state_dtype))
