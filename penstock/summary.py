"""Summaries of tokens, for the variants of all families: the public function ``summary``."""

from __future__ import annotations

from torch import Tensor

from .call.families import by_variant
from .tokens.summaries import MatrixSummary, Summary


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
    impl: str = "auto",
) -> Summary | MatrixSummary:
    r"""What a run of tokens does to a state: a transition, and a state that is added. Tokens are not read by queries.

    Variants without removal (linear_attention, retention, simple_gla, gla, rwkv5, rwkv6): the state becomes :math:`diag(e^D) S + Z`,

    .. math:: D = \sum_t g_t, \qquad Z = scale \sum_t (k_t \circ e^{\sum_{s>t} g_s})^T v_t

    The delta rule (delta_rule, gated_delta_rule, kda, rwkv7, dplr): the state becomes :math:`M S + L`. M is the product of the transitions
    of the tokens, L the final state of a call that begins at zeros.

    A long sequence cut into slices has the states ``one.after(state)`` between them, from summaries that are computed side by side;
    ``first.then(second)`` is the summary of two slices.

    Gradients of states go back in time. ``adjoint``, for variants without removal: with k = q and v = dO, the gradient of the state before
    the tokens is :math:`diag(e^D) dS + Z`,

    .. math:: Z = scale \sum_t (q_t \circ e^{\sum_{s \le t} g_s})^T dO_t \quad (rwkv5, rwkv6: s < t)

    By the delta rule it is :math:`M^T dS + dL`: dL is the gradient of the initial state of a call from dO alone.

    variant : str
        linear_attention, retention, simple_gla, gla, rwkv5, rwkv6, delta_rule, gated_delta_rule, kda, rwkv7 or dplr.
    k : Tensor [B,T,G,K]
        As in the function of this variant; as the adjoint, q or r.
    v : Tensor [B,T,H,V]
        As in the function of this variant; as the adjoint, the gradient of the output.
    g : Tensor, optional
        The log decay, as in the function of this variant.
    initial_state : Tensor [B,H,K,V], optional
        The state before the tokens, or as the adjoint the gradient of that after them; the sum begins with it. Default: zeros.
    scale : float
        Multiplies the sum. 1 for the delta rule.
    reverse : bool
        Run time backwards: token T-1 comes first. Not for the delta rule.
    adjoint : bool
        Whether gradients of states are carried, from the last token to the first. Not for the delta rule.
    beta, a, b, A_log, dt_bias, raw_decay, lower_bound, use_qk_l2norm, beta_logits, allow_neg_eigval :
        As in the function of the variant, for those that have them; ``use_qk_l2norm`` is about k.
    impl : str
        "auto", or "triton", "chunkwise" or "reference"; for the delta rule a name from ``penstock.implementations`` of the variant.

    Returns ``Summary(state, decay)``, by the delta rule ``MatrixSummary(state, matrix)``. Gradients flow from both to every floating-point
    input. Raises as the variant's function does. By the delta rule it is two calls of that function: one for the state, with V channels,
    and one for the matrix, with K.

    >>> import torch
    >>> k, v = torch.randn(1, 7, 2, 8), torch.randn(1, 7, 2, 8)
    >>> g, beta = -torch.rand(1, 7, 2, 8), torch.rand(1, 7, 2)
    >>> first, second = (summary("gla", k[:, part], v[:, part], g[:, part]) for part in (slice(4), slice(4, 7)))
    >>> torch.testing.assert_close(first.then(second).state, summary("gla", k, v, g).state)
    >>> whole = summary("kda", k, v, g, beta=beta, use_qk_l2norm=True)
    >>> whole.state.shape, whole.matrix.shape
    (torch.Size([1, 2, 8, 8]), torch.Size([1, 2, 8, 8]))
    """
    others = {
        "scale": None if scale == 1 else scale, "reverse": reverse, "adjoint": adjoint, "beta": beta, "a": a, "b": b, "A_log": A_log,
        "dt_bias": dt_bias, "raw_decay": raw_decay, "lower_bound": lower_bound, "use_qk_l2norm": use_qk_l2norm, "beta_logits": beta_logits,
        "allow_neg_eigval": allow_neg_eigval,
    }  # fmt: skip
    run, taken = by_variant("summary", variant, others)
    return run(variant, k, v, g, initial_state=initial_state, impl=impl, **taken)  # type: ignore[no-any-return]
