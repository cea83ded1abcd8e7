"""One public function per variant: formula, shapes, source. All are the same operator behind a row of the table.

Common to all functions over sequences
--------------------------------------
q (r in RWKV), k ``[B,T,H,K]`` and v ``[B,T,H,V]`` in one dtype (float16, bfloat16, float32 or float64), any strides, any
sizes. Log decays are natural logarithms, at most 0 (-inf is legal), in any of these dtypes.

scale : float, optional
    Multiplies the output. Default ``K ** -0.5``; 1 for RWKV.
initial_state : Tensor [N,H,K,V], optional
    The state before the first token of each of the N sequences (N = B unless packed). Default: zeros.
output_final_state : bool
    Whether to return the state after the last token.
cu_seqlens : int32 or int64 Tensor [N+1], optional
    Packed sequences: B is 1 and sequence n is tokens ``cu_seqlens[n]`` to ``cu_seqlens[n+1]`` of the token axis. Begins
    at 0, never falls, ends at T; empty sequences are allowed.
reverse : bool
    Run time backwards: token T-1 comes first.
impl : str
    "auto", or a name from ``penstock.implementations()``, which then runs or raises.

They return ``Result(output, final_state)``: output ``[B,T,H,V]`` in v's dtype; final_state ``[N,H,K,V]`` in float32
(float64 for float64 inputs), None unless asked for. Gradients flow from both to every floating-point input.

They raise ``ShapeError``, ``DtypeError``, ``DeviceError`` or ``RangeError`` (all ``InvalidArgument``), listing every broken
rule, and ``ImplementationRefused`` when a named implementation cannot take the call. Under autocast, q, k and v are cast
to its dtype, as for a matrix product; decays, u and states are not.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dispatch, eager
from .errors import Complaints, RangeError
from .feature_maps import FeatureMap, featured
from .operator import autocast
from .problem import Problem, check_types, state_dtype
from .variants import VARIANTS


class Result(NamedTuple):
    """What the functions over sequences return."""

    output: Tensor
    """[B,T,H,V], v's dtype"""
    final_state: Tensor | None
    """[N,H,K,V], float32 (float64 for float64 inputs); None unless asked for"""


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
    impl: str = "auto",
) -> Result:
    r"""Causal linear attention: no decay.

    .. math:: S_t = S_{t-1} + \phi(k_t)^T v_t, \qquad o_t = scale \cdot \phi(q_t) S_t

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, equations 16 to 20.

    feature_map : "elu+1", "relu", "identity", a callable or None
        phi, applied to q and k; None is the identity. A callable maps a tensor to one of the same shape.
    normalize : bool
        Divide by the sum of the weights, :math:`o_t = \phi(q_t) S_t / (\phi(q_t) \cdot z_t)` with
        :math:`z_t = z_{t-1} + \phi(k_t)`; the scale cancels. z is carried as one more column of the state, so initial
        and final state are then ``[N,H,K,V+1]``. Where no weight is positive (relu), this is 0/0 = nan. To decode on such
        a state, give ``decode_step`` the mapped q and k, and v with a column of ones, and divide by the last column.

    Everything else: see the head of this module. Implementations: all.

    >>> q, k, v = (torch.rand(1, 5, 2, 8) for _ in range(3))
    >>> linear_attention(q, k, v, feature_map="elu+1", normalize=True).output.shape
    torch.Size([1, 5, 2, 8])
    """
    check_types("linear_attention", {"q": q, "k": k, "v": v}, {}, {"normalize": normalize}, frozenset())
    q, k, v = featured(q, k, v, feature_map, normalize)
    result = _run("linear_attention", q, k, v, None, None, scale, initial_state, output_final_state, cu_seqlens, reverse, impl)
    if not normalize:
        return result
    return Result(result.output[..., :-1] / result.output[..., -1:], result.final_state)


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
    impl: str = "auto",
) -> Result:
    r"""Retention: one constant decay per head.

    .. math:: S_t = e^{g} S_{t-1} + k_t^T v_t, \qquad o_t = scale \cdot q_t S_t

    Source: Sun et al. 2023 (RetNet), arXiv 2307.08621, equations 5 and 6. With a g of its own it is also Lightning Attention.

    g : Tensor [H], optional
        Log decay of each head, natural logarithm, at most 0. Default: RetNet's ``log(1 - 2 ** (-5 - h))``.

    Everything else: see the head of this module. Implementations: all.

    >>> q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    >>> retention(q, k, v).output.shape
    torch.Size([1, 5, 2, 8])
    """
    g = _retnet_decay(q) if g is None else g
    return _run("retention", q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens, reverse, impl)


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
    impl: str = "auto",
) -> Result:
    r"""Gated linear attention with one decay per token and head; Mamba-2's state space duality.

    .. math:: S_t = e^{g_t} S_{t-1} + k_t^T v_t, \qquad o_t = scale \cdot q_t S_t

    Source: Dao and Gu 2024 (Mamba-2), arXiv 2405.21060: q = C, k = B, v = x dt, g = dt A, scale = 1.

    g : Tensor [B,T,H]
        Log decay, natural logarithm, at most 0.

    Everything else: see the head of this module. Implementations: all.

    >>> q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    >>> simple_gla(q, k, v, -torch.rand(1, 5, 2)).output.shape
    torch.Size([1, 5, 2, 8])
    """
    return _run("simple_gla", q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens, reverse, impl)


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
    impl: str = "auto",
) -> Result:
    r"""Gated linear attention: one decay per token and key channel.

    .. math:: S_t = diag(e^{g_t}) S_{t-1} + k_t^T v_t, \qquad o_t = scale \cdot q_t S_t

    Source: Yang et al. 2023 (GLA), arXiv 2312.06635, equation 3. HGRN2 is this with k = 1 - exp(g).

    g : Tensor [B,T,H,K]
        Log decay, natural logarithm, at most 0. GLA layers use ``logsigmoid(low_rank(x)) / 16``.

    Everything else: see the head of this module. Implementations: all.

    >>> q, k, v, x = (torch.randn(1, 5, 2, 8) for _ in range(4))
    >>> gla(q, k, v, torch.nn.functional.logsigmoid(x)).output.shape
    torch.Size([1, 5, 2, 8])
    """
    return _run("gla", q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens, reverse, impl)


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
    impl: str = "auto",
) -> Result:
    r"""RWKV-5 (Eagle): a constant decay per channel, the previous state read, a bonus for the token itself.

    .. math:: o_t = scale \cdot r_t (S_{t-1} + diag(u) k_t^T v_t), \qquad S_t = diag(e^{w}) S_{t-1} + k_t^T v_t

    Source: Peng et al. 2024, arXiv 2404.05892, section 4.

    w : Tensor [H,K]
        Log decay, natural logarithm, at most 0. Checkpoints store x with decay exp(-exp(x)): pass ``-exp(x)``.
    u : Tensor [H,K]
        Bonus ("time_faaaa").

    Everything else: see the head of this module. Implementations: all.

    >>> r, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    >>> rwkv5(r, k, v, -torch.rand(2, 8), torch.randn(2, 8)).output.shape
    torch.Size([1, 5, 2, 8])
    """
    return _run("rwkv5", r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, reverse, impl)


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
    impl: str = "auto",
) -> Result:
    r"""RWKV-6 (Finch): a decay per token and channel, the previous state read, a bonus for the token itself.

    .. math:: o_t = scale \cdot r_t (S_{t-1} + diag(u) k_t^T v_t), \qquad S_t = diag(e^{w_t}) S_{t-1} + k_t^T v_t

    Source: Peng et al. 2024, arXiv 2404.05892, section 4.

    w : Tensor [B,T,H,K]
        Log decay, natural logarithm, at most 0. Models compute x with decay exp(-exp(x)): pass ``-exp(x)``.
    u : Tensor [H,K]
        Bonus ("time_faaaa").

    Everything else: see the head of this module. Implementations: all.

    >>> r, k, v, x = (torch.randn(1, 5, 2, 8) for _ in range(4))
    >>> rwkv6(r, k, v, -torch.exp(x), torch.randn(2, 8)).output.shape
    torch.Size([1, 5, 2, 8])
    """
    return _run("rwkv6", r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens, reverse, impl)


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

    The formula is that of ``variant``, the name of a function of this module, begun at each sequence's row of the pool.

    q, k : Tensor [N,H,K] or [N,T,H,K]
        One token a sequence, or T <= 16 of them. RWKV's r is q.
    v : Tensor [N,H,V] or [N,T,H,V]
    g : Tensor, optional
        Log decay: [H] for retention (default RetNet's), [N,(T,)H] for simple_gla, [N,(T,)H,K] for gla and rwkv6, [H,K] for rwkv5.
    u : Tensor [H,K], optional
        Bonus, for rwkv5 and rwkv6.
    state : Tensor [slots,H,K,V]
        The pool, any floating dtype and strides. Arithmetic is float32 (float64 for float64 q).
    slots : int32 or int64 Tensor [N], optional
        The row of each sequence, all different. A negative slot skips its sequence: its output is 0, no row changes.
        Default: sequence n is row n, and the pool has N rows.
    scale : float, optional
        As for the variant.

    Returns the output, [N,H,V] or [N,T,H,V], in v's dtype. Raises as the functions over sequences do; then the pool is
    unchanged. There is no gradient: inputs that require one are refused unless under ``torch.no_grad()``.

    >>> state = torch.zeros(4, 2, 8, 8)
    >>> q, k, v = (torch.randn(3, 2, 8) for _ in range(3))
    >>> decode_step("linear_attention", q, k, v, state=state, slots=torch.tensor([2, -1, 0])).shape
    torch.Size([3, 2, 8])
    """
    options = (variant, scale, impl)
    direct, call = eager.unobserved(q, k, v, g, u, state, slots), None
    if direct:
        q, k, v = autocast(q, k, v)
        call = eager.find(q, k, v, g, u, state, slots, *options)
    if call is None:
        _known_variant("decode_step", variant)
        name = f"decode_step({variant!r})"
        tensors: dict[str, object] = {"q": q, "k": k, "v": v, "g": g, "u": u, "state": state, "slots": slots}
        check_types(name, tensors, {"scale": scale}, {}, frozenset({"g", "u", "slots"}))
        dispatch.check_name(name, impl)
    given = (q, k, v, g, u, state, slots, *options)
    one = q.dim() == 3
    if one:
        q, k, v = (x.unsqueeze(1) if x.dim() == 3 else x for x in (q, k, v))
        if g is not None and "T" in VARIANTS[variant].decay:
            g = g.unsqueeze(1)
    if variant == "retention" and g is None:
        g = _retnet_decay(q)
    if direct:
        call = call or eager.remember(eager.StepCall, given, (q, k, v, g, u, state, slots), *options)
        output: Tensor = call.run((q, k, v, g, u, state, slots))
    else:
        output = torch.ops.penstock.step(*autocast(q, k, v), g, u, state, slots, *options)
    return output.squeeze(1) if one else output


def explain(variant: str, *args: Any, **kwargs: Any) -> dispatch.Explanation:
    """What ``impl="auto"`` would run for this call of a variant's function, and why the others would not.

    Takes the arguments of the function named ``variant`` and checks them as it does. Printing the answer shows the walk. Where
    gradients are wanted (an input requires them, and they are enabled), what runs the backward pass also runs forward if it can
    keep states on the way, so the answer can differ from that for the same call without gradients.

    >>> q = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    >>> explain("linear_attention", q, q, q).forward
    'chunkwise'
    """
    _known_variant("explain", variant)
    row = VARIANTS[variant]
    bound = inspect.signature(globals()[variant]).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    q, k, v = given[row.query], given["k"], given["v"]
    if variant == "linear_attention":
        check_types(variant, {"q": q, "k": k, "v": v}, {}, {"normalize": given["normalize"]}, frozenset())
        q, k, v = featured(q, k, v, given["feature_map"], given["normalize"])
    g, u = given.get(row.gate) if row.gate else None, given.get("u")
    if variant == "retention" and g is None:
        g = _retnet_decay(q)
    scale, initial_state, cu_seqlens, reverse = (given[name] for name in ("scale", "initial_state", "cu_seqlens", "reverse"))
    _check_types_of_call(variant, q, k, v, g, u, scale, initial_state, given["output_final_state"], cu_seqlens, reverse, given["impl"])
    q, k, v = autocast(q, k, v)
    tensors = q, k, v, g, u, initial_state, cu_seqlens
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    gradients = wanted and eager.unobserved(*tensors)  # torch's operator does not know whether they are
    return dispatch.explain(Problem.checked(*tensors, variant, scale, reverse), gradients)


def _run(
    variant: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    u: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    reverse: bool,
    impl: str,
) -> Result:
    others, options = (g, u, initial_state, cu_seqlens), (variant, scale, reverse, impl)
    direct, call = eager.unobserved(q, k, v, *others), None
    if direct:
        q, k, v = autocast(q, k, v)
        call = eager.find(q, k, v, *others, *options)
    if call is None or type(output_final_state) is not bool:
        _check_types_of_call(variant, q, k, v, g, u, scale, initial_state, output_final_state, cu_seqlens, reverse, impl)
    tensors = (q, k, v, *others)
    if direct:
        call = call or eager.remember(eager.Call, (*tensors, *options), tensors, *options)
        return Result(*eager.run(call, tensors, output_final_state))
    output, final_state = torch.ops.penstock.forward(*autocast(q, k, v), *others, *options[:3], output_final_state, impl)
    return Result(output, final_state if output_final_state else None)


def _check_types_of_call(
    variant: str,
    q: object,
    k: object,
    v: object,
    g: object,
    u: object,
    scale: object,
    initial_state: object,
    output_final_state: object,
    cu_seqlens: object,
    reverse: object,
    impl: str,
) -> None:
    """Python types of what a function over sequences was given, and the implementation's name."""
    row = VARIANTS[variant]
    tensors = {row.query: q, "k": k, "v": v, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    if row.gate:
        tensors[row.gate] = g
    if row.bonus:
        tensors["u"] = u
    flags = {"output_final_state": output_final_state, "reverse": reverse}
    check_types(variant, tensors, {"scale": scale}, flags, frozenset({"initial_state", "cu_seqlens"}))
    dispatch.check_name(variant, impl)


def _retnet_decay(q: Tensor) -> Tensor:
    """log(1 - 2 ** (-5 - h)) for the heads of q [B,T,H,K], float32 or float64."""
    if not isinstance(q, Tensor) or q.dim() != 4:
        return q  # refused where all arguments are checked
    made = q.shape[2], state_dtype(q.dtype), q.device
    keeps = eager.unobserved(q, q, q) and not (q.is_cuda and torch.cuda.is_current_stream_capturing())
    return _kept_retnet_decay(*made) if keeps else _made_retnet_decay(*made)


def _made_retnet_decay(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    h = torch.arange(heads, dtype=torch.float64, device=device)
    return torch.log1p(-torch.exp2(-5 - h)).to(dtype)


@lru_cache(maxsize=256)
def _kept_retnet_decay(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same, made once; never of memory that belongs to a graph, nor a tensor that autograd may not keep."""
    with torch.inference_mode(False):
        return _made_retnet_decay(heads, dtype, device)


def _known_variant(function: str, variant: str) -> None:
    if not isinstance(variant, str) or variant not in VARIANTS:
        complaints = Complaints(function)
        complaints.add(RangeError, "variant", f"one of {', '.join(VARIANTS)}", repr(variant))
        complaints.raise_any()
