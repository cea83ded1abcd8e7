"""One public function per variant: formula, shapes, source. All of them call one operator with a row of the table.

``documentation`` completes the docstrings: see ``help(gla)``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..errors import Complaints, ShapeError
from ..tokens.context import ContextParallel
from ..tokens.decays import retnet_decay
from ..tokens.feature_maps import FeatureMap, featured, needs_float32, normalized
from ..tokens.pools import STEP_TOKENS
from . import documentation
from .operators import ADVANCE, RECURRENCE
from .slices import over_ranks
from .variants import VARIANTS, check_variant


class Result(NamedTuple):
    """The result of the functions over sequences."""

    output: Tensor
    """[B,T,H,V], v's dtype"""
    final_state: Tensor | None
    """[N,H,K,V], float32 (float64 for float64 inputs); None unless asked for"""


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


@documentation.in_place("[N,T")
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
    """One token, or a few, for each of N sequences whose states are rows of a pool; the pool is updated **in place**.

    <variant>
    q, k : Tensor [N,G,K] or [N,T,G,K]
        One token per sequence, or T <= 16. Without the axis T, decays have none either. RWKV's r is q. float16, bfloat16, float32 or
        float64, any strides. G is H or a divisor of it.
    v : Tensor [N,H,V] or [N,T,H,V]
        In q's dtype.
    <decays>
    state : Tensor [slots,H,K,V]
        The pool, any floating dtype and strides. Arithmetic is float32 (float64 for float64 q).
    <slots>
    <last>

    Returns the output, [N,H,V] or [N,T,H,V], in v's dtype. Raises ``InvalidArgument`` with every broken rule, or ``ImplementationRefused``;
    then the pool is unchanged. There is no gradient: inputs that require one are refused unless under ``torch.no_grad()``.

    >>> import torch
    >>> state = torch.zeros(4, 2, 8, 8)
    >>> q, k, v = (torch.randn(3, 2, 8) for _ in range(3))
    >>> decode_step("linear_attention", q, k, v, state=state, slots=torch.tensor([2, -1, 0])).shape
    torch.Size([3, 2, 8])
    """
    check_variant("decode_step", variant)
    one = isinstance(q, Tensor) and q.dim() == 3
    if one:
        q = q.unsqueeze(1)
        if isinstance(k, Tensor) and k.dim() == 3:
            k = k.unsqueeze(1)
        if isinstance(v, Tensor) and v.dim() == 3:
            v = v.unsqueeze(1)
        if isinstance(g, Tensor) and g.dim() and "T" in VARIANTS[variant].decay:
            g = g.unsqueeze(1)
    elif isinstance(q, Tensor) and q.dim() == 4 and not q.is_nested and q.shape[1] > STEP_TOKENS:
        complaints = Complaints(f"decode_step({variant!r})")
        complaints.add(ShapeError, "T", f"at most {STEP_TOKENS} tokens a sequence", q.shape[1], "Use advance() for more.")
        complaints.raise_any()
    output = _advance("decode_step", variant, q, k, v, g, u, state, slots, None, scale, impl)
    return output.squeeze(1) if one else output


@documentation.in_place("[1 or N,T")
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
    """Advance sequences of any lengths, such as decode steps and parts of prompts, from rows of a pool that is updated **in place**.

    The state after p tokens of a row is a function of these tokens alone: the first ``64 * (p // 64)`` are processed in pieces of 64 from
    the beginning of the row, the rest token by token. So if a sequence is cut at multiples of 64 tokens, its outputs and states are
    bitwise equal wherever it is cut and whatever the other rows are. (Exception: without ``cu_seqlens``, ``impl="chunkwise"`` and
    ``"parallel"`` multiply rows of one length together; the bits are then those of torch's products.)

    <variant>
    q, k : Tensor [1,T,G,K] with ``cu_seqlens``, else [N,T,G,K]
        RWKV's r is q. float16, bfloat16, float32 or float64, any strides. G is H or a divisor of it.
    v : Tensor [1,T,H,V] or [N,T,H,V]
        In q's dtype.
    <decays>
    state : Tensor [P,H,K,V]
        The pool, any floating dtype and strides. Its rows must not overlap, nor share memory with other tensors. Arithmetic is float32
        (float64 for float64 q).
        On a GPU, pieces of 64 tokens are computed as by ``triton_chunkwise``. The state is rounded to the pool's dtype after each piece
        and after each token of the rest.
    <slots>
    cu_seqlens : int32 or int64 Tensor [N+1], optional
        Packed sequences: sequence n is tokens ``cu_seqlens[n]`` to ``cu_seqlens[n+1]``; it may be empty.
    <last>

    Returns the output, in v's shape and dtype. Raises ``InvalidArgument`` with every broken rule, or ``ImplementationRefused``; then the
    pool is unchanged. There is no gradient: inputs that require one are refused unless under ``torch.no_grad()``. On a GPU the host never
    waits for the device, and the call can be captured in a CUDA graph.

    >>> import torch
    >>> pool = torch.zeros(4, 2, 8, 8)
    >>> q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    >>> ends, slots = torch.tensor([0, 1, 2, 9]), torch.tensor([3, 0, 1])  # two decode rows, a prompt of 7 tokens
    >>> advance("linear_attention", q, k, v, state=pool, slots=slots, cu_seqlens=ends).shape
    torch.Size([1, 9, 2, 8])
    """
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
