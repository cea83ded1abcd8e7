"""One public function per variant: formula, shapes, source. All of them call one operator with a row of the table.

``documentation`` completes the docstrings: see ``help(gla)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..call.autocast import cast
from ..errors import Complaints, DtypeError, RangeError, ShapeError, described, shortened
from ..tokens.context import ContextParallel, Passes
from ..tokens.decays import retnet_decay
from ..tokens.feature_maps import FeatureMap, featured, needs_float32, normalized
from ..tokens.pools import STEP_TOKENS
from . import documentation
from .operators import ADVANCE, RECURRENCE, SUMMARY
from .variants import VARIANTS


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
    _check_variant("decode_step", variant)
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
    _check_variant("advance", variant)
    return _advance("advance", variant, q, k, v, g, u, state, slots, cu_seqlens, scale, impl)


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
    _check_variant("summary", variant)
    if variant == "retention" and g is None:
        g = retnet_decay(v)
    state, decay = SUMMARY(f"summary({variant!r})", (k, v, g, initial_state), (scale, reverse, adjoint), impl)
    assert state is not None
    assert decay is not None
    return Summary(state, decay)


def _run(
    variant: str, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...], impl: str, context: ContextParallel | None
) -> Result:  # fmt: skip
    if context is not None:
        return _over_ranks(variant, tensors, options, impl, context)
    output, final_state = RECURRENCE(variant, tensors, options, impl)
    assert output is not None
    return Result(output, final_state)


def _over_ranks(
    variant: str, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...], impl: str, context: ContextParallel
) -> Result:  # fmt: skip
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
    by = "reference" if impl == "reference" else "auto"
    row, run = VARIANTS[variant], (scale, False, True)

    def forward(given: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        return tuple(RECURRENCE(variant, tuple(given), run, impl))  # type: ignore[return-value]

    def summed(x: Tensor, y: Tensor, g: Tensor | None, state: Tensor | None, adjoint: bool) -> tuple[Tensor, Tensor]:
        factor = (row.scale if row.scale is not None else x.shape[3] ** -0.5) if scale is None else scale
        made, decay = SUMMARY(f"summary({variant!r})", (x, y, g, state), (factor if adjoint else 1.0, False, adjoint), by)
        assert made is not None
        assert decay is not None
        return made, decay

    passes = Passes(variant, forward, summed, "T" in row.decay)
    return Result(*context.run(passes, cast(tensors, RECURRENCE.cast), bool(wanted)))


def _advance(
    function: str, variant: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, u: Tensor | None, state: Tensor,
    slots: Tensor | None, cu_seqlens: Tensor | None, scale: float | None, impl: str,
) -> Tensor:  # fmt: skip
    if variant == "retention" and g is None:
        g = retnet_decay(v)
    (output,) = ADVANCE(f"{function}({variant!r})", (q, k, v, g, u, cu_seqlens, slots, state), (scale,), impl)
    assert output is not None
    return output


def _check_variant(function: str, variant: object) -> None:
    if not isinstance(variant, str) or variant not in VARIANTS:
        complaints = Complaints(function)
        complaints.add(RangeError, "variant", f"one of {', '.join(VARIANTS)}", shortened(variant))
        complaints.raise_any()
