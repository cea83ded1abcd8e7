"""Sequences cut into slices: what the tokens of a slice do to the state, and calls whose slices are on the ranks of a group.

A run of tokens turns a state S into M S + L. L is the final state of a call that begins at zeros, and M that of a call without values that
begins at the identity: M is the state of K value channels of which nothing is written. The gradient of the state before the tokens,
M^T dS' + dL, is that of a call's initial state.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..call.autocast import cast
from ..call.derivatives import Tensors
from ..call.validation import check, check_types, known_values
from ..errors import Complaints
from ..tokens import context as slices
from ..tokens.context import ContextParallel
from ..tokens.dtypes import state_dtype
from ..tokens.passes import Passes
from ..tokens.summaries import MATRIX, MatrixSummary
from .declaration import RAW_OPTIONS, summed
from .operators import DELTA
from .raw_options import checked_gates
from .variants import VARIANTS, check_variant

SUMMARIES = {row.name: summed(row) for row in VARIANTS.values()}
"""The arguments of ``summary``: those of ``DELTA`` but q and ``cu_seqlens``."""
CAST = [one.name in ("k", "v", "a", "b") for one in summed(VARIANTS["kda"]).arguments]
"""Which of them autocast casts."""


def summary(
    variant: str,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    raw_decay: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm: bool = False,
    beta_logits: bool = False,
    allow_neg_eigval: bool = False,
    impl: str = "auto",
) -> MatrixSummary:
    """``penstock.summary`` of this family's variants."""
    check_variant("summary", variant)
    flags = use_qk_l2norm, beta_logits, allow_neg_eigval, lower_bound
    g, raw = checked_gates("summary", variant, g, A_log, raw_decay, flags)
    signature, tensors = SUMMARIES[variant], cast((k, v, g, beta, a, b, raw, A_log, dt_bias, initial_state), CAST)
    compiling = torch.compiler.is_compiling()
    if not compiling:  # compiled graphs check the calls of the operator
        check_types(signature, tensors, RAW_OPTIONS, flags)
        check(signature, tensors, {"lower_bound": lower_bound})
    k, *others, state = tensors  # type: ignore[assignment]
    given, options = (k, k, *others, None), (1.0, True, *flags)
    with nullcontext() if compiling else known_values("g"):
        made = DELTA(variant, (*given, state), options, impl)[1]
        matrix = DELTA(variant, _unwritten(given), options, impl)[1]
    assert made is not None
    assert matrix is not None
    return MatrixSummary(made, matrix)


def _unwritten(given: Tensors) -> tuple[Tensor | None, ...]:
    """The tensors of a call, but for the initial state, without values, from the identity: zeros [B,T,H,K] and ones on a diagonal."""
    q, k, v, *others = given
    assert q is not None
    assert v is not None
    (B, T, H), K = v.shape[:3], q.shape[3]
    identity = torch.eye(K, dtype=state_dtype(q.dtype), device=q.device).expand(B, H, K, K)
    return (q, k, v.new_zeros(B, T, H, K), *others, identity)


def over_ranks(
    variant: str, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...], impl: str, context: ContextParallel
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A call whose tokens are those of one rank of a group."""
    scale, wanted, *flags = options

    def summarized(given: Tensors, state: Tensor | None, wanted: bool) -> tuple[Tensor, Tensor | None]:
        made = passes.call((*given[:-1], state))[1]
        if not wanted:
            return made, None
        with known_values("g"):  # the call before has checked them
            return made, passes.call(_unwritten(given[:-1]))[1]

    def adjoint(given: Tensors, d_output: Tensor, d_state: Tensor | None) -> Tensor:
        q, v = given[0], given[2]
        assert q is not None
        assert v is not None
        state = v.new_zeros(1, dtype=state_dtype(q.dtype)).expand(v.shape[0], v.shape[2], q.shape[3], v.shape[3])
        with known_values("g"):  # the forward pass has checked them
            found = passes.backward((*given[:-1], state), (d_output, d_state), (), [False] * (len(given) - 1) + [True])[-1]
        assert found is not None
        return found

    passes = Passes(DELTA, variant, (scale, True, *flags), impl, MATRIX, summarized, adjoint, shares=False)
    return slices.over_ranks(passes, tensors, context, wanted, Complaints(variant))
