"""One public function per variant: formula, shapes, source. All of them call one operator with a row of the table.

``documentation`` completes the docstrings: see ``help(kda)``. ``advance`` and ``decode_step`` are called by those of ``penstock.in_place``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..tokens.context import ContextParallel
from ..tokens.pools import one_token
from ..tokens.results import Result
from . import documentation
from .operators import ADVANCE, DELTA
from .raw_options import check_flag, check_options, checked_gates, gates
from .slices import over_ranks
from .variants import VARIANTS, check_variant


@documentation.over_sequences("delta_rule")
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm: bool = False,
    beta_logits: bool = False,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str = "auto",
) -> Result:
    r"""The delta rule (DeltaNet): a token replaces part of what the state returns for its key by its value. No decay.

    .. math:: S_t = (I - \beta_t k_t^T k_t) S_{t-1} + \beta_t k_t^T v_t, \qquad o_t = scale \cdot q_t S_t

    Source: Yang et al. 2024, arXiv 2406.06484.

    <inputs>
    <beta>
    <keys>
    <options>

    >>> import torch
    >>> q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    >>> delta_rule(q, k, v, torch.rand(1, 5, 2), use_qk_l2norm=True).output.shape
    torch.Size([1, 5, 2, 8])
    """
    flags = use_qk_l2norm, beta_logits, allow_neg_eigval, None
    given = (cu_seqlens, initial_state)
    return _run("delta_rule", (q, k, v, None, beta, None, None), None, None, flags, given, scale, output_final_state, impl, context)


@documentation.over_sequences("gated_delta_rule", bias="[H]")
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_qk_l2norm: bool = False,
    beta_logits: bool = False,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str = "auto",
) -> Result:
    r"""The gated delta rule (Gated DeltaNet): one decay per token and head, before the removal.

    .. math:: S_t = (I - \beta_t k_t^T k_t) e^{g_t} S_{t-1} + \beta_t k_t^T v_t, \qquad o_t = scale \cdot q_t S_t

    Source: Yang et al. 2024, arXiv 2412.06464.

    <inputs>
    g : Tensor [B,T,H]
        Log decay, natural logarithm, at most 0; with ``A_log`` a raw gate.
    <beta>
    <raw>
    <keys>
    <options>

    >>> import torch
    >>> q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    >>> x, beta, A_log = torch.randn(1, 5, 2), torch.randn(1, 5, 2), torch.zeros(2)
    >>> gated_delta_rule(q, k, v, x, beta, A_log=A_log, use_qk_l2norm=True, beta_logits=True).output.shape
    torch.Size([1, 5, 2, 8])
    """
    flags = use_qk_l2norm, beta_logits, allow_neg_eigval, None
    given = (cu_seqlens, initial_state)
    return _run(
        "gated_delta_rule", (q, k, v, g, beta, None, None), A_log, dt_bias, flags, given, scale, output_final_state, impl, context
    )  # fmt: skip


@documentation.over_sequences("kda", bias="[H,K]", bounded=", or as ``lower_bound`` says")
def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm: bool = False,
    beta_logits: bool = False,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str = "auto",
) -> Result:
    r"""Kimi delta attention: the gated delta rule with one decay per token and key channel.

    .. math:: S_t = (I - \beta_t k_t^T k_t) diag(e^{g_t}) S_{t-1} + \beta_t k_t^T v_t, \qquad o_t = scale \cdot q_t S_t

    Source: Kimi Team 2025, arXiv 2510.26692.

    <inputs>
    g : Tensor [B,T,H,K]
        Log decay, natural logarithm, at most 0; with ``A_log`` a raw gate.
    <beta>
    <raw>
    lower_bound : float, optional
        With ``A_log``: the log decay is ``lower_bound * sigmoid(exp(A_log) (x + dt_bias))``. Below 0.
    <keys>
    <options>

    >>> import torch
    >>> q, k, v, x = (torch.randn(1, 5, 2, 8) for _ in range(4))
    >>> beta, A_log, dt_bias = torch.rand(1, 5, 2), torch.zeros(2), torch.zeros(2, 8)
    >>> kda(q, k, v, x, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=-5, use_qk_l2norm=True).output.shape
    torch.Size([1, 5, 2, 8])
    """
    flags = use_qk_l2norm, beta_logits, allow_neg_eigval, lower_bound
    given = (cu_seqlens, initial_state)
    return _run("kda", (q, k, v, g, beta, None, None), A_log, dt_bias, flags, given, scale, output_final_state, impl, context)


@documentation.over_sequences("rwkv7", "r", "1")
def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    raw_decay: bool = False,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str = "auto",
) -> Result:
    r"""RWKV-7 (Goose): a decay per token and channel; what is removed is read from the state before its decay.

    .. math:: S_t = (diag(e^{w_t}) + b_t^T a_t) S_{t-1} + k_t^T v_t, \qquad o_t = scale \cdot r_t S_t

    Source: Peng et al. 2025, arXiv 2503.14456. There the state is V x K: ``S diag(w) + S a b^T + v k^T``, with a the negative of the
    normalised removal key and b that key times the in-context learning rate.

    <inputs>
    w : Tensor [B,T,H,K]
        Log decay, natural logarithm, at most 0. Comes before k and v, as in RWKV's own kernels. These take x with log decay ``-exp(x)``,
        for which models compute ``x = -softplus(-raw) - 0.5``: pass ``-exp(x)``, or ``raw`` itself with ``raw_decay``.
    a, b : Tensor [B,T,G,K] or [B,T,H,K]
        Both have the same heads. In the dtype of r.
    raw_decay : bool
        w is a raw gate: the log decay is ``-exp(-0.5) * sigmoid(w)``, as in models.
    lower_bound : float, optional
        What no log decay w is below, such as -0.6066 where w is ``-exp(-0.5) * sigmoid(raw)``. On a GPU it saves half of the time and more:
        see "The bound of decays" in docs/delta.md. With ``raw_decay`` it is None: the bound is known.
    <options>

    >>> import torch
    >>> r, w, k, v, kk = (torch.randn(1, 5, 2, 8) for _ in range(5))
    >>> kk = torch.nn.functional.normalize(kk, dim=-1)
    >>> rwkv7(r, w, k, v, -kk, kk * 0.5, raw_decay=True).output.shape
    torch.Size([1, 5, 2, 8])
    """
    flags = False, False, False, lower_bound
    check_flag("rwkv7", "raw_decay", raw_decay)
    given = (cu_seqlens, initial_state)
    return _run("rwkv7", (r, k, v, w, None, a, b), None, None, flags, given, scale, output_final_state, impl, context, raw_decay)


@documentation.over_sequences("dplr")
def dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    *,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str = "auto",
) -> Result:
    r"""Transitions that are diagonal plus low rank: a decay per channel, and a product of two vectors of each token.

    .. math:: S_t = (diag(e^{g_t}) + b_t^T a_t) S_{t-1} + k_t^T v_t, \qquad o_t = scale \cdot q_t S_t

    Source: flash-linear-attention, ``dplr_delta_rule``.

    <inputs>
    a, b : Tensor [B,T,G,K] or [B,T,H,K]
        Both have the same heads. In the dtype of q. States are bounded only if transitions do not expand: the caller sees to it.
    g : Tensor [B,T,H,K]
        Log decay, natural logarithm, at most 0.
    lower_bound : float, optional
        What no log decay is below, as of ``rwkv7``.
    <options>

    >>> import torch
    >>> q, k, v, x, g = (torch.randn(1, 5, 2, 8) for _ in range(5))
    >>> x = torch.nn.functional.normalize(x, dim=-1)
    >>> dplr(q, k, v, -x, x, -g.abs()).output.shape
    torch.Size([1, 5, 2, 8])
    """
    flags = False, False, False, lower_bound
    given = (cu_seqlens, initial_state)
    return _run("dplr", (q, k, v, g, None, a, b), None, None, flags, given, scale, output_final_state, impl, context)


def advance(
    variant: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    raw_decay: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm: bool = False,
    beta_logits: bool = False,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """``penstock.advance`` of this family's variants."""
    check_variant("advance", variant)
    flags = use_qk_l2norm, beta_logits, allow_neg_eigval, lower_bound
    return _advance("advance", variant, (q, k, v, g, beta, a, b), A_log, dt_bias, raw_decay, flags, (cu_seqlens, slots, state), scale, impl)


def decode_step(
    variant: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    raw_decay: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm: bool = False,
    beta_logits: bool = False,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """``penstock.decode_step`` of this family's variants."""
    check_variant("decode_step", variant)
    one, tensors = one_token(ADVANCE.signatures[f"decode_step({variant!r})"], (q, k, v, g, beta, a, b))
    flags = use_qk_l2norm, beta_logits, allow_neg_eigval, lower_bound
    output = _advance("decode_step", variant, tuple(tensors), A_log, dt_bias, raw_decay, flags, (None, slots, state), scale, impl)
    return output.squeeze(1) if one else output


def _run(
    variant: str, tensors: tuple[Tensor | None, ...], A_log: Tensor | None, dt_bias: Tensor | None, flags: tuple[Any, ...],
    rest: tuple[Tensor | None, Tensor | None], scale: float | None, output_final_state: bool, impl: str,
    context: ContextParallel | None, raw_decay: bool = False,
) -> Result:  # fmt: skip
    q, k, v, gate, *others = tensors
    g, raw = gates(VARIANTS[variant], gate, A_log, raw_decay)
    if any(x is not None and x is not False for x in flags):
        check_options(variant, VARIANTS[variant], flags, raw)
    given, options = (q, k, v, g, *others, raw, A_log, dt_bias, *rest), (scale, output_final_state, *flags)
    if context is not None:
        return Result(*over_ranks(variant, given, options, impl, context))
    output, final_state = DELTA(variant, given, options, impl)
    assert output is not None
    return Result(output, final_state)


def _advance(
    function: str, variant: str, tensors: tuple[Tensor | None, ...], A_log: Tensor | None, dt_bias: Tensor | None, raw_decay: bool,
    flags: tuple[Any, ...], rest: tuple[Tensor | None, ...], scale: float | None, impl: str,
) -> Tensor:  # fmt: skip
    q, k, v, gate, *others = tensors
    g, raw = checked_gates(function, variant, gate, A_log, raw_decay, flags)
    (output,) = ADVANCE(f"{function}({variant!r})", (q, k, v, g, *others, raw, A_log, dt_bias, *rest), (scale, *flags), impl)
    assert output is not None
    return output
