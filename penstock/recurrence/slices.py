"""Sequences cut into slices: what the tokens of a slice do to the state, and calls whose slices are on the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from ..call.autocast import cast
from ..call.derivatives import Tensors
from ..call.implementation import Upstream
from ..call.operator import Explain
from ..call.validation import known_values
from ..errors import Complaints, DtypeError, RangeError, described, shortened
from ..tokens.context import ContextParallel, Passes
from ..tokens.decays import retnet_decay
from .declaration import default_scale
from .operators import RECURRENCE, SUMMARY
from .variants import VARIANTS, check_variant


class Summary(NamedTuple):
    """What tokens do to a state."""

    state: Tensor
    """[B,H,K,V]: the state after the tokens if that before them is ``initial_state``, float32 (float64 for float64 inputs)."""
    decay: Tensor
    """[B,H,K]: the log decay by which they multiply the state, natural logarithm, in the same dtype."""


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
    r"""What a run of tokens does to the state: it becomes :math:`diag(e^D) S + Z`. Tokens are not read by queries.

    .. math:: D = \sum_t g_t, \qquad Z = scale \sum_t (k_t \circ e^{\sum_{s>t} g_s})^T v_t

    A long sequence cut into slices has the states :math:`S_{i+1} = diag(e^{D_i}) S_i + Z_i` between them, from summaries that are computed
    side by side. ``adjoint`` is the same for gradients of states, which go back in time: with k = q and v = dO, the gradient of the state
    before the tokens is :math:`diag(e^D) dS + Z`,

    .. math:: Z = scale \sum_t (q_t \circ e^{\sum_{s \le t} g_s})^T dO_t \quad (rwkv5, rwkv6: s < t)

    variant : str
        linear_attention, retention, simple_gla, gla, rwkv5 or rwkv6.
    k : Tensor [B,T,G,K]
        As in the function of this variant; as the adjoint, q or r.
    v : Tensor [B,T,H,V]
        As in the function of this variant; as the adjoint, the gradient of the output.
    g : Tensor, optional
        The log decay, as in the function of this variant.
    initial_state : Tensor [B,H,K,V], optional
        The state before the tokens, or as the adjoint the gradient of that after them; the sum begins with it. Default: zeros.
    scale : float
        Multiplies the sum.
    reverse : bool
        Run time backwards: token T-1 comes first.
    adjoint : bool
        Whether gradients of states are carried, from the last token to the first.
    impl : str
        "auto", "triton", "chunkwise" or "reference".

    Returns ``Summary(state, decay)``. Gradients flow from both to every floating-point input. Raises as the variant's function does.

    >>> import torch
    >>> k, v = torch.randn(1, 7, 2, 8), torch.randn(1, 7, 2, 8)
    >>> g = -torch.rand(1, 7, 2, 8)
    >>> first, second = (summary("gla", k[:, part], v[:, part], g[:, part]) for part in (slice(4), slice(4, 7)))
    >>> whole = second.decay.exp()[..., None] * first.state + second.state
    >>> torch.testing.assert_close(whole, summary("gla", k, v, g).state)
    """
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
    if not isinstance(context, ContextParallel):
        complaints.add(DtypeError, "context", "a ContextParallel or None", described(context), "See penstock.distributed.")
    if reverse is not False:
        complaints.add(
            RangeError, "reverse", "False with a context", shortened(reverse), "Flip the tokens, and give ranks the opposite order."
        )
    complaints.raise_any()
    by = next((one.name for one in SUMMARY.family.implementations if impl.startswith(one.name)), "auto")  # of the same kind
    row, run = VARIANTS[variant], (scale, False, True)

    def call(given: Tensors) -> tuple[Tensor, Tensor]:
        return tuple(RECURRENCE(variant, tuple(given), run, impl))  # type: ignore[return-value]

    def forward(given: Tensors) -> tuple[tuple[Tensor, Tensor], Tensors]:
        return RECURRENCE.forward(variant, given, run, impl)  # type: ignore[return-value]

    def backward(given: Tensors, d_results: Tensors, residuals: Tensors, needed: Sequence[bool]) -> Tensors:
        return RECURRENCE.backward(variant, given, run, impl, Upstream(tuple(d_results), (), tuple(residuals), tuple(needed)))

    def summed(x: Tensor, y: Tensor, g: Tensor | None, state: Tensor | None, adjoint: bool) -> tuple[Tensor, Tensor]:
        factor = default_scale({"K": x.shape[3]}, row) if scale is None else scale
        with known_values("g") if adjoint else nullcontext():  # the forward pass has checked them, or layers have made them
            made, decay = SUMMARY(f"summary({variant!r})", (x, y, g, state), (factor if adjoint else 1.0, False, adjoint), by)
        assert made is not None
        assert decay is not None
        return made, decay

    if isinstance(impl, Explain):
        call((*tensors[:-2], context.cu_seqlens, None))
    passes = Passes(variant, call, forward, backward, summed, "T" in row.decay)
    return context.run(passes, cast(tensors, RECURRENCE.cast), bool(wanted))
