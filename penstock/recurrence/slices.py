"""Sequences cut into slices: what the tokens of a slice do to the state, and calls whose slices are on the ranks of a group."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..call.derivatives import Tensors
from ..call.validation import known_values
from ..errors import Complaints, RangeError, shortened
from ..tokens import context as slices
from ..tokens.context import ContextParallel
from ..tokens.decays import retnet_decay
from ..tokens.passes import Passes
from ..tokens.summaries import DIAGONAL, Summary
from .declaration import default_scale
from .operators import RECURRENCE, SUMMARY
from .variants import VARIANTS, check_variant


def summary(
    variant: str,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    scale: float = 1.0,
    reverse: bool = False,
    adjoint: bool = False,
    impl: str = "auto",
) -> Summary:
    """``penstock.summary`` of this family's variants."""
    check_variant("summary", variant)
    if variant == "retention" and g is None:
        g = retnet_decay(v)
    state, decay = SUMMARY(f"summary({variant!r})", (k, v, g, initial_state), (scale, reverse, adjoint), impl)
    assert state is not None
    assert decay is not None
    return Summary(state, decay)


def over_ranks(
    variant: str, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...], impl: str, context: ContextParallel
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A call whose tokens are those of one rank of a group."""
    scale, reverse, wanted = options
    complaints = Complaints(variant)
    if reverse is not False:
        complaints.add(
            RangeError, "reverse", "False with a context", shortened(reverse), "Flip the tokens, and give ranks the opposite order."
        )
    by = next((one.name for one in SUMMARY.family.implementations if impl.startswith(one.name)), "auto")  # of the same kind

    def summed(x: Tensor | None, y: Tensor | None, g: Tensor | None, state: Tensor | None, factor: float, adjoint: bool) -> Tensors:
        return SUMMARY(f"summary({variant!r})", (x, y, g, state), (factor, False, adjoint), by)

    def summarized(given: Tensors, state: Tensor | None, wanted: bool) -> tuple[Tensor, Tensor | None]:
        made, decay = summed(given[1], given[2], given[3], state, 1.0, False)
        assert made is not None
        assert decay is not None
        return made, decay[..., None]

    def adjoint(given: Tensors, d_output: Tensor, d_state: Tensor | None) -> Tensor:
        assert given[0] is not None
        factor = default_scale({"K": given[0].shape[3]}, VARIANTS[variant]) if scale is None else scale
        with known_values("g"):  # the forward pass has checked them, or layers have made them
            made = summed(given[0], d_output, given[3], d_state, factor, True)[0]
        assert made is not None
        return made

    passes = Passes(RECURRENCE, variant, (scale, False, True), impl, DIAGONAL, summarized, adjoint, shares=True)
    return slices.over_ranks(passes, tensors, context, wanted, complaints)
