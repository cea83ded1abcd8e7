"""One public function per variant: formula, shapes, source. All of them call one operator with a row of the table.

``documentation`` completes the docstrings: see ``help(gla)``. ``advance`` and ``decode_step`` are called by those of ``penstock.in_place``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..tokens.context import ContextParallel
from ..tokens.decays import retnet_decay
from ..tokens.feature_maps import FeatureMap, featured, needs_float32, normalized
from ..tokens.pools import one_token
from ..tokens.results import Result
from . import documentation
from .operators import ADVANCE, RECURRENCE
from .slices import over_ranks
from .variants import check_variant


@documentation.over_sequences("q", "``K ** -0.5``")
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap = None,
    normalize: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    context: ContextParallel | None = None,
    impl: str = "auto",
) -> Result:
    r"""Causal linear attention: no decay.

    .. math:: S_t = S_{t-1} + \phi(k_t)^T v_t, \qquad o_t = scale \cdot \phi(q_t) S_t

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, equations 16 to 20.

    <inputs>
    feature_map : "elu+1", "relu", "identity", a callable or None
        phi, applied to q and k; None is the identity. A callable maps a tensor to one of the same shape.
    normalize : bool
        Divide by the sum of the weights, :math:`o_t = \phi(q_t) S_t / (\phi(q_t) \cdot z_t)` with
        :math:`z_t = z_{t-1} + \phi(k_t)`; the scale cancels. z is carried as one more column of the state, so initial
        and final state are then ``[N,H,K,V+1]``. float16 is computed as float32, because sums of weights have a wider range.
        Where no weight is positive (relu), this is 0/0 = nan. To decode on such a state, pass ``decode_step`` the mapped q and k,
        and v with a column of ones (float32 in place of float16), and divide by the last column.
    <options>

    >>> import torch
    >>> q, k, v = (torch.rand(1, 5, 2, 8) for _ in range(3))
    >>> linear_attention(q, k, v, feature_map="elu+1", normalize=True).output.shape
    torch.Size([1, 5, 2, 8])
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Result:
        return _run(
            "linear_attention", (q, k, v, None, None, cu_seqlens, initial_state), (scale, reverse, output_final_state), impl, context
        )

    wide = normalize is True and needs_float32(q, k, v)
    q, k = featured("linear_attention", q, k, feature_map, normalize, wide)
    return Result(*normalized(attend, q, k, v, wide)) if normalize else attend(q, k, v)


@documentation.over_sequences("q", "``K ** -0.5``")
def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    context: ContextParallel | None = None,
    impl: str = "auto",
) -> Result:
    r"""Retention: one constant decay per head.

    .. math:: S_t = e^{g} S_{t-1} + k_t^T v_t, \qquad o_t = scale \cdot q_t S_t

    Source: Sun et al. 2023 (RetNet), arXiv 2307.08621, equations 5 and 6. With another g, this is Lightning Attention.

    <inputs>
    g : Tensor [H], optional
        Log decay of each head, natural logarithm, at most 0. Default: RetNet's ``log(1 - 2 ** (-5 - h))``.
    <options>

    >>> import torch
    >>> q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    >>> retention(q, k, v).output.shape
    torch.Size([1, 5, 2, 8])
    """
    g = retnet_decay(v) if g is None else g
    return _run("retention", (q, k, v, g, None, cu_seqlens, initial_state), (scale, reverse, output_final_state), impl, context)


@documentation.over_sequences("q", "``K ** -0.5``")
def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    context: ContextParallel | None = None,
    impl: str = "auto",
) -> Result:
    r"""Gated linear attention with one decay per token and head; Mamba-2's state space duality.

    .. math:: S_t = e^{g_t} S_{t-1} + k_t^T v_t, \qquad o_t = scale \cdot q_t S_t

    Source: Dao and Gu 2024 (Mamba-2), arXiv 2405.21060: q = C, k = B, v = x dt, g = dt A, scale = 1.

    <inputs>
    g : Tensor [B,T,H]
        Log decay, natural logarithm, at most 0.
    <options>

    >>> import torch
    >>> q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    >>> simple_gla(q, k, v, -torch.rand(1, 5, 2)).output.shape
    torch.Size([1, 5, 2, 8])
    """
    return _run("simple_gla", (q, k, v, g, None, cu_seqlens, initial_state), (scale, reverse, output_final_state), impl, context)


@documentation.over_sequences("q", "``K ** -0.5``")
def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    context: ContextParallel | None = None,
    impl: str = "auto",
) -> Result:
    r"""Gated linear attention: one decay per token and key channel.

    .. math:: S_t = diag(e^{g_t}) S_{t-1} + k_t^T v_t, \qquad o_t = scale \cdot q_t S_t

    Source: Yang et al. 2023 (GLA), arXiv 2312.06635, equation 3. HGRN2 is this with k = 1 - exp(g).

    <inputs>
    g : Tensor [B,T,H,K]
        Log decay, natural logarithm, at most 0. GLA layers use ``logsigmoid(low_rank(x)) / 16``.
    <options>

    >>> import torch
    >>> q, k, v, x = (torch.randn(1, 5, 2, 8) for _ in range(4))
    >>> gla(q, k, v, torch.nn.functional.logsigmoid(x)).output.shape
    torch.Size([1, 5, 2, 8])
    """
    return _run("gla", (q, k, v, g, None, cu_seqlens, initial_state), (scale, reverse, output_final_state), impl, context)


@documentation.over_sequences("r", "1")
def rwkv5(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    context: ContextParallel | None = None,
    impl: str = "auto",
) -> Result:
    r"""RWKV-5 (Eagle): a constant decay per channel, the previous state read, a bonus for the token itself.

    .. math:: o_t = scale \cdot r_t (S_{t-1} + diag(u) k_t^T v_t), \qquad S_t = diag(e^{w}) S_{t-1} + k_t^T v_t

    Source: Peng et al. 2024, arXiv 2404.05892, section 4.

    <inputs>
    w : Tensor [H,K]
        Log decay, natural logarithm, at most 0. Checkpoints store x with decay exp(-exp(x)): pass ``-exp(x)``.
    u : Tensor [H,K]
        Bonus ("time_faaaa").
    <options>

    >>> import torch
    >>> r, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    >>> rwkv5(r, k, v, -torch.rand(2, 8), torch.randn(2, 8)).output.shape
    torch.Size([1, 5, 2, 8])
    """
    return _run("rwkv5", (r, k, v, w, u, cu_seqlens, initial_state), (scale, reverse, output_final_state), impl, context)


@documentation.over_sequences("r", "1")
def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    context: ContextParallel | None = None,
    impl: str = "auto",
) -> Result:
    r"""RWKV-6 (Finch): a decay per token and channel, the previous state read, a bonus for the token itself.

    .. math:: o_t = scale \cdot r_t (S_{t-1} + diag(u) k_t^T v_t), \qquad S_t = diag(e^{w_t}) S_{t-1} + k_t^T v_t

    Source: Peng et al. 2024, arXiv 2404.05892, section 4.

    <inputs>
    w : Tensor [B,T,H,K]
        Log decay, natural logarithm, at most 0. Models compute x with decay exp(-exp(x)): pass ``-exp(x)``.
    u : Tensor [H,K]
        Bonus ("time_faaaa").
    <options>

    >>> import torch
    >>> r, k, v, x = (torch.randn(1, 5, 2, 8) for _ in range(4))
    >>> rwkv6(r, k, v, -torch.exp(x), torch.randn(2, 8)).output.shape
    torch.Size([1, 5, 2, 8])
    """
    return _run("rwkv6", (r, k, v, w, u, cu_seqlens, initial_state), (scale, reverse, output_final_state), impl, context)


def decode_step(
    variant: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    u: Tensor | None = None,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """``penstock.decode_step`` of this family's variants."""
    check_variant("decode_step", variant)
    one, (q, k, v, g) = one_token(ADVANCE.signatures[f"decode_step({variant!r})"], (q, k, v, g))  # type: ignore[assignment]
    output = _advance("decode_step", variant, q, k, v, g, u, state, slots, None, scale, impl)
    return output.squeeze(1) if one else output


def advance(
    variant: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    u: Tensor | None = None,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """``penstock.advance`` of this family's variants."""
    check_variant("advance", variant)
    return _advance("advance", variant, q, k, v, g, u, state, slots, cu_seqlens, scale, impl)


def _run(
    variant: str, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...], impl: str, context: ContextParallel | None
) -> Result:  # fmt: skip
    if context is not None:
        return Result(*over_ranks(variant, tensors, options, impl, context))
    output, final_state = RECURRENCE(variant, tensors, options, impl)
    assert output is not None
    return Result(output, final_state)


def _advance(
    function: str, variant: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, u: Tensor | None, state: Tensor,
    slots: Tensor | None, cu_seqlens: Tensor | None, scale: float | None, impl: str,
) -> Tensor:  # fmt: skip
    if variant == "retention" and g is None:
        g = retnet_decay(v)
    (output,) = ADVANCE(f"{function}({variant!r})", (q, k, v, g, u, cu_seqlens, slots, state), (scale,), impl)
    assert output is not None
    return output
