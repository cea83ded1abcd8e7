"""Updates of states in place, for the variants of all families: the public functions ``decode_step`` and ``advance``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .call.families import by_variant
from .documentation import filled

DECAYS = """\
g : Tensor, optional
    Log decay, natural logarithm, at most 0: [H] for retention (default RetNet's), {tokens},H] for simple_gla and gated_delta_rule,
    {tokens},H,K] for gla, rwkv6, kda, rwkv7 and dplr, [H,K] for rwkv5. A raw gate with ``A_log`` or ``raw_decay``.
u : Tensor [H,K], optional
    Bonus, for rwkv5 and rwkv6.
beta : Tensor {tokens},H], optional
    Writing strength, for delta_rule, gated_delta_rule and kda.
a, b : Tensor {tokens},G,K] or {tokens},H,K], optional
    The two vectors of rwkv7 and dplr, in the dtype of q."""
RAW = """\
A_log, dt_bias, raw_decay, lower_bound, use_qk_l2norm, beta_logits, allow_neg_eigval :
    As in the function of the variant, for those that have them."""
SLOTS = """\
slots : int32 or int64 Tensor [N], optional
    The row of each sequence, all different. A negative slot skips its sequence: its output is 0, no row changes. Default: sequence n is row
    n, and the pool has N rows."""
LAST = """\
scale : float, optional
    Multiplies the output. Default: ``K ** -0.5``; 1 for rwkv5, rwkv6 and rwkv7.
impl : str
    "auto", or a name from ``penstock.implementations()`` of the variant, which then runs or raises."""
VARIANT = """\
variant : str
    linear_attention, retention, simple_gla, gla, rwkv5, rwkv6, delta_rule, gated_delta_rule, kda, rwkv7 or dplr: the formula is that of
    this function, begun at each sequence's row of the pool."""
PARTS = {"variant": VARIANT, "raw": RAW, "slots": SLOTS, "last": LAST}


@filled(decays=DECAYS.format(tokens="[N,T"), **PARTS)
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
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
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
    """One token, or a few, for each of N sequences whose states are rows of a pool; the pool is updated **in place**.

    <variant>
    q, k : Tensor [N,G,K] or [N,T,G,K]
        One token per sequence, or T <= 16. Without the axis T, the other inputs have none either. RWKV's r is q. float16, bfloat16, float32
        or float64, any strides. G is H or a divisor of it.
    v : Tensor [N,H,V] or [N,T,H,V]
        In q's dtype.
    <decays>
    state : Tensor [slots,H,K,V]
        The pool, any floating dtype and strides. Arithmetic is float32 (float64 for float64 q).
    <slots>
    <raw>
    <last>

    Returns the output, [N,H,V] or [N,T,H,V], in v's dtype. Raises ``InvalidArgument`` with every broken rule, or ``ImplementationRefused``;
    then the pool is unchanged. There is no gradient: inputs that require one are refused unless under ``torch.no_grad()``.

    >>> import torch
    >>> state = torch.zeros(4, 2, 8, 8)
    >>> q, k, v = (torch.randn(3, 2, 8) for _ in range(3))
    >>> decode_step("linear_attention", q, k, v, state=state, slots=torch.tensor([2, -1, 0])).shape
    torch.Size([3, 2, 8])
    """
    others = _others(u, beta, a, b, A_log, dt_bias, raw_decay, lower_bound, use_qk_l2norm, beta_logits, allow_neg_eigval)
    run, taken = by_variant("decode_step", variant, others)
    return run(variant, q, k, v, g, state=state, slots=slots, scale=scale, impl=impl, **taken)  # type: ignore[no-any-return]


@filled(decays=DECAYS.format(tokens="[1 or N,T"), **PARTS)
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
    beta: Tensor | None = None,
    a: Tensor | None = None,
    b: Tensor | None = None,
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
        On a GPU, pieces of 64 tokens are computed as by the chunked kernels. The state is rounded to the pool's dtype after each piece
        and after each token of the rest.
    <slots>
    cu_seqlens : int32 or int64 Tensor [N+1], optional
        Packed sequences: sequence n is tokens ``cu_seqlens[n]`` to ``cu_seqlens[n+1]``; it may be empty.
    <raw>
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
    >>> beta = torch.rand(1, 9, 2)
    >>> advance("delta_rule", q, k, v, beta=beta, use_qk_l2norm=True, state=pool, slots=slots, cu_seqlens=ends).shape
    torch.Size([1, 9, 2, 8])
    """
    others = _others(u, beta, a, b, A_log, dt_bias, raw_decay, lower_bound, use_qk_l2norm, beta_logits, allow_neg_eigval)
    run, taken = by_variant("advance", variant, others)
    options: dict[str, Any] = {"state": state, "slots": slots, "cu_seqlens": cu_seqlens, "scale": scale, "impl": impl}
    return run(variant, q, k, v, g, **options, **taken)  # type: ignore[no-any-return]


def _others(*values: Any) -> dict[str, Any]:
    """Arguments that not all variants have, by name."""
    return dict(zip(OTHERS, values))


OTHERS = (
    "u", "beta", "a", "b", "A_log", "dt_bias", "raw_decay", "lower_bound", "use_qk_l2norm", "beta_logits", "allow_neg_eigval",
)  # fmt: skip
