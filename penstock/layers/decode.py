"""Fused kernels of RWKV's updates in place, around its linear maps: a norm, a token shift, low-rank maps or a recurrence in one kernel.

A function that returns None has no kernel for this call and has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..call import private
from .as_written import altered
from .fused import norm_of
from .linear import Mode, mode, plain_weights, ready
from .triton import kernels

if TYPE_CHECKING:
    from .sequences import Sequences

SHIFTED_TOKENS = 1024
"""The most tokens for ``shifted_norm``. For more, ``token_shift`` computes all interpolations of a token together: it moves fewer bytes."""


def shifted_norm(
    x: Tensor, y: Tensor | None, norm: Any, pool: Tensor, sequences: Sequences, *factors: Tensor, complement: bool = False,
    kept: bool = False,
) -> Any:  # fmt: skip
    """``add_norm`` and ``token_shift`` for updates in place in one kernel, which writes the last tokens to the pool of shift states.

    Returns a ``few_rows_launch.Shifted``. ``complement``: the factors are 1 - factors_i. ``kept``: also return the norm and the previous
    tokens.
    """
    few = sequences.single or mode().alike or x.shape[0] * x.shape[1] <= SHIFTED_TOKENS
    if torch.is_grad_enabled() or private.autocasting() or not (sequences.in_place and few):
        return None
    if isinstance(parts := norm_of(norm, sequences.halvings), str):
        return None
    weight, bias, eps, centre = parts
    launch = kernels("few_rows_launch", x, y, weight, bias, pool, *factors)
    same = all(one is None or one.dtype == x.dtype for one in (y, weight))
    if launch is None or not same or x.shape[-1] > 2**14 or pool.stride(1) != 1:
        return None
    flat = [None if one is None else one.reshape(-1, x.shape[-1]).contiguous() for one in (x, y)]
    slots = None if sequences.slots is None else sequences.slots.contiguous()
    mu = [one.reshape(-1).contiguous() for one in factors]
    early = ready((norm.weight, getattr(norm, "bias", None), *factors), (weight, bias, *mu))
    spans = None if sequences.single else (sequences.starts, sequences.bounds)
    options = {"centre": centre, "complement": complement, "kept": kept, "early": early}
    found = launch.shifted_norm(*flat, weight, bias, eps, pool, slots, mu, spans, **options)
    whole = [one.view(x.shape) for one in found[:3]]
    return launch.Shifted(*whole, tuple(one.view(x.shape) for one in found.mixed))


WIDTH = 2048
"""The hidden size C for which ``low_rank_maps`` and ``channel_mix`` run, that of RWKV-6 1.6B. Together they save 6 to 7 % of a step of one
token on an NVIDIA H200. ``low_rank_maps`` followed by other maps, or with more tokens, is slower. Other sizes were not measured."""


def _one_row(
    x: Tensor, y: Tensor | None, norm: Any, pool: Tensor, sequences: Sequences, factors: Sequence[Tensor], others: Sequence[Tensor],
    maps: Sequence[nn.Module],
) -> tuple[Any, Any, list[Tensor]] | None:  # fmt: skip
    """For one token in a graph whose kernels may read all these parameters early: the launching module, its ``Shift``, and map weights."""
    if torch.is_grad_enabled() or mode() != Mode(graph=True) or not (sequences.single and sequences.in_place) or private.autocasting():
        return None
    if x.shape != (1, 1, WIDTH) or sequences.slots is None or (weights := plain_weights(maps)) is None:
        return None
    if isinstance(parts := norm_of(norm, sequences.halvings), str):
        return None
    weight, bias, eps, centre = parts
    learned = [one for one in (norm.weight, None if bias is None else norm.bias, *factors, *others, *weights) if one is not None]
    few_rows = kernels("few_rows_launch", x, y, pool, *learned)
    launch = None if few_rows is None else few_rows.on_hopper(x.device, "hopper_one_row_launch")
    if launch is None or x.element_size() != 2 or any(one.dtype != x.dtype for one in (*learned, x if y is None else y)):
        return None
    if not all(one.is_contiguous() for one in learned) or not ready(learned, learned) or pool.shape[0] == 0 or pool.stride(1) != 1:
        return None
    flat = [None if one is None else one.reshape(1, -1).contiguous() for one in (x, y)]
    mu = [one.view(-1) for one in factors]
    return launch, launch.Shift(*flat, weight, bias, eps, centre, pool, sequences.slots.contiguous(), mu), weights


def low_rank_maps(
    x: Tensor, y: Tensor | None, norm: Any, pool: Tensor, sequences: Sequences, mu: Tensor, down: Tensor, factors: Sequence[Tensor],
    up: Tensor, decay: Tensor, maps: Sequence[nn.Module],
) -> tuple[Tensor, list[Tensor], Any] | None:  # fmt: skip
    r"""``shifted_norm`` by mu, a linear map, ``token_shift`` with a low-rank part, and linear maps of its results, in two kernels.

    .. math:: x_i = z + (p - z) m_i, \qquad m_i = factors_i + \tanh((z + (p - z) mu) W_i) U_i

    z is the norm of x + y, p the row of the pool. mu and factors have C elements, down [C,5*M] is the concatenation of all W_i, up is
    [5,M,C]. The first linear map is x_0 decay, decay [C,D]; ``maps`` are the others.

    Returns x + y, the results of the linear maps, and a ``few_rows_launch.Lasts``: the caller still has to replace the row of the pool.
    """
    found = _one_row(x, y, norm, pool, sequences, factors, [mu, down, up, decay], maps)
    if found is None:
        return None
    launch, shift, weights = found
    weights = [decay.T, *weights]
    if not launch.takes_low_rank(up, weights):
        return None
    total, results, lasts = launch.low_rank_maps(shift, mu.view(-1), down, up, weights)
    return total.view(x.shape), [one[None] for one in results], lasts


def channel_mix(
    x: Tensor, y: Tensor | None, norm: Any, pool: Tensor, sequences: Sequences, factors: Sequence[Tensor], maps: Sequence[nn.Module]
) -> tuple[Tensor, Tensor] | None:
    """The sum x + y, and RWKV-6's channel mix of its norm, in two kernels. ``maps``: key, receptance and value."""
    found = None if sequences.halvings else _one_row(x, y, norm, pool, sequences, factors, [], maps)
    if found is None:
        return None
    launch, shift, weights = found
    if not launch.takes_channel_mix(*weights):
        return None
    total, mixed = launch.channel_mix(shift, *weights)
    return total.view(x.shape), mixed.view(x.shape)


def rwkv_step(
    r: Tensor, k: Tensor, v: Tensor, gate: Tensor, u: Tensor, bias: Tensor, norm: nn.GroupNorm, pool: Tensor, sequences: Sequences,
    low_rank: tuple[Tensor, Tensor] | None = None, lasts: Any = None,
) -> Tensor | None:  # fmt: skip
    """A decode step in a graph as one kernel: decay, recurrence in place, ``norm_gate`` of its output.

    r, k : Tensor [B,1,H*K]
    v, gate : Tensor [B,1,H*V]
    u : Parameter [H,K] or [H,1]
    bias : Parameter [H,K], [H,1] or [H*K]
        The log decay is -exp(bias), or with ``low_rank`` = (hidden [B,1,M], up [M,H*K]) -exp(bias + tanh(hidden) up).
    norm : nn.GroupNorm
        The norm of heads.
    pool : Tensor [P,H,K,V]
        The states; row ``slots[n]`` is updated in place.
    lasts : few_rows_launch.Lasts, optional
        The row of a shift state to replace.

    Returns a Tensor [B,1,H*V].
    """
    if torch.is_grad_enabled() or mode() != Mode(graph=True) or not (sequences.single and sequences.in_place) or private.autocasting():
        return None
    if altered(norm, nn.GroupNorm) or norm.weight is None or norm.bias is None:
        return None
    (H, K, V), (low, up) = pool.shape[1:], low_rank or (None, None)
    activations = [x for x in (r, k, v, gate, low) if x is not None]
    weights = [x for x in (norm.weight, norm.bias, up) if x is not None]
    launch = kernels("few_rows_launch", *activations, *weights, u, bias, pool)
    if launch is None or any(x.dtype != r.dtype for x in activations) or not all(x.is_contiguous() for x in weights):
        return None
    learned = [*weights, u, bias]
    if not ready(learned, learned):
        return None
    u, bias = u.expand(H, K), bias.view(H, -1).expand(H, K)
    M = 0 if up is None else up.shape[0]
    if pool.shape[0] == 0 or max(K, V, M) > 512 or max(K * V, K * M) > 2**14:
        return None
    slots = None if sequences.slots is None else sequences.slots.contiguous()
    low = None if low is None else low.flatten(0, 1).contiguous()
    heads = [x.reshape(x.shape[0], H, size).contiguous() for x, size in ((r, K), (k, K), (v, V), (gate, V))]
    found: Tensor = launch.rwkv_step(*heads, u, bias, low, up, pool, slots, norm.weight, norm.bias, norm.eps, lasts=lasts)
    return found.view(v.shape)
