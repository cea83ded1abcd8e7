"""Chains of element-wise operations between matrix products: one Triton kernel per chain on a GPU, plain PyTorch elsewhere.

As single operations, such a chain reads and writes each activation up to ten times; a layer's matrix products do so once. The fused kernels
compute in float32 and round once. Both forms have the same gradients, of any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call.autocast import autocasting
from ..call.recompute import again
from ..tokens.dtypes import state_dtype
from .activations import sigmoid, tanh
from .as_written import runs_as_written
from .linear import as_products, linear, mode, plain_weights
from .norms import RMSNorm
from .pool_rows import PoolRows
from .triton import kernels

if TYPE_CHECKING:
    from .sequences import Sequences


def token_shift(
    x: Tensor, last: Tensor | PoolRows | TokensBefore, sequences: Sequences, *factors: Tensor,
    low_rank: tuple[Tensor, Tensor] | None = None, kept: bool = False, complement: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    r"""Interpolations between each token and the one before it.

    .. math:: y_{i,t} = x_t + (x_{t-1} - x_t) m_i, \qquad m_i = factors_i + \tanh(hidden_{i,t}) W_i

    x : Tensor [B,T,C]
    last : Tensor [N,C], PoolRows, or TokensBefore
        The token before the first one of each sequence, or before every token.
    factors : Tensors of C elements
    low_rank : (hidden [B,T,n,M], W [n,M,C]), optional
        A low-rank part of the factors, per token.
    kept : bool
        Return x, too, for its other uses. Without ``low_rank``, the backward kernel adds their gradient to that of x.
    complement : bool
        Without ``low_rank``: m_i = 1 - factors_i, computed as :math:`x_{t-1} + (x_t - x_{t-1}) factors_i`, exact for small factors.

    Returns one Tensor [B,T,C] for each of the factors.
    """
    if kept and (low_rank is not None or not torch.is_grad_enabled()):
        return *token_shift(x, last, sequences, *factors, low_rank=low_rank, complement=complement), x
    hidden, up = low_rank or (None, None)
    if isinstance(last, TokensBefore):
        return tuple(one.view(x.shape) for one in _shift_of_pairs(x, last.x, factors, low_rank))
    pool, slots = (last.pool, last.slots) if isinstance(last, PoolRows) else (last, None)
    launch = kernels("token_shift_launch", x, pool, *factors, hidden, up) if len(factors) <= 5 else None
    if up is not None and hidden is not None:
        hidden, up = hidden.flatten(0, 1), up.to(hidden.dtype)
        if launch and up.shape[1] > 64:
            launch = None
    flat = x.flatten(0, 1).contiguous()
    if launch is not None and not torch.is_grad_enabled():
        up, hidden = (None if one is None else one.contiguous() for one in (up, hidden))
        rows = [factor.reshape(-1).contiguous() for factor in factors]
        options = {"tanh": up is not None, "complement": complement}
        found = launch.shifted(flat, pool, sequences.starts, slots, rows, hidden, up, **options).unbind()
        return tuple(one.view(x.shape) for one in found)
    last = (last.read() if isinstance(last, PoolRows) else last).to(x.dtype)
    hidden = None if hidden is None else tanh(hidden)
    mu = torch.stack([factor.reshape(-1) for factor in factors])
    given = [None if one is None else one.contiguous() for one in (flat, last, sequences.starts, mu, hidden, up)]
    formula: Any = partial(kept_formula if kept else shift_formula, complement=complement)
    if launch is None and sequences.single:
        given[2] = None
    function = formula if launch is None else lambda *given: launch.TokenShift.apply(*given, formula, kept, complement)
    return tuple(one.view(x.shape) for one in again(function(*given), function, *given))


def _shift_of_pairs(
    x: Tensor, before: Tensor, factors: tuple[Tensor, ...], low_rank: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, ...]:  # fmt: skip
    """``token_shift`` of what ``shifted_norm`` returns."""
    x, before, (hidden, up) = x.flatten(0, 1), before.flatten(0, 1), low_rank or (None, None)
    launch = kernels("few_rows_launch", x, before, *factors, hidden, up) if len(factors) <= 5 else None
    if hidden is None or up is None:
        return shift_formula(x, before, None, factors, None, None)
    hidden, cast = hidden.flatten(0, 1), up.to(hidden.dtype)
    if launch is None:
        return shift_formula(x, before, None, factors, tanh(hidden), cast)
    mu, rows = [one.reshape(-1).contiguous() for one in factors], cast.contiguous()
    early = ready((*factors, up), (*mu, rows))
    found: tuple[Tensor, ...] = launch.low_rank(hidden.contiguous(), rows, mu, x, before, early=early)
    return found


def ready(parameters: Sequence[Tensor | None], read: Sequence[Tensor | None]) -> bool:
    """Whether a kernel may read these tensors, made of ``parameters``, before the previous kernel ends.

    No kernel of a graph writes parameters. Outside graphs the previous kernel may update them. A copy or a cast may be its result.
    """
    if not mode().graph:
        return False
    pairs = [(one, other) for one, other in zip(parameters, read) if one is not None and other is not None]
    return all(isinstance(one, nn.Parameter) and one.data_ptr() == other.data_ptr() for one, other in pairs)


def shift_formula(
    x: Tensor, last: Tensor, starts: Tensor | None, mu: Tensor | tuple[Tensor, ...], hidden: Tensor | None, up: Tensor | None,
    complement: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``token_shift`` of x [R,C]: mu are n rows of C elements, [C] or [1,1,C], hidden is [R,n,M].

    ``starts`` [R] is the index of the sequence that begins at a token, or -1. None: each token is a sequence.
    """
    if starts is not None:
        last = torch.where((starts < 0)[:, None], x.roll(1, 0), last.index_select(0, starts.clamp(min=0).long()))
    if complement:
        x, last = last, x
    dx = last - x
    if hidden is None or up is None:
        return tuple(torch.addcmul(x, dx, factor.to(x.dtype)) for factor in mu)
    rows = (mu if isinstance(mu, Tensor) else torch.stack(mu)).view(len(mu), 1, -1)
    if mode().alike:  # in torch's product, the bits of a row depend on its index
        factors = rows.to(hidden.dtype) + torch.stack([linear(one, part.T) for one, part in zip(hidden.unbind(1), up)])
    else:
        factors = torch.baddbmm(rows.to(hidden.dtype), hidden.transpose(0, 1), up)
    return torch.addcmul(x, dx, factors.to(x.dtype)).unbind()


def kept_formula(
    x: Tensor, last: Tensor, starts: Tensor | None, mu: Tensor | tuple[Tensor, ...], hidden: Tensor | None, up: Tensor | None,
    complement: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``shift_formula``, and x."""
    return *shift_formula(x, last, starts, mu, hidden, up, complement), x


def norm_gate(x: Tensor, gate: Tensor, norm: nn.Module, then: nn.Module, *, grouped: bool) -> Tensor:
    r"""The norm of each head, times a gate; then a linear map.

    .. math:: y = W_{then} (norm(x) \cdot silu(gate))

    On a GPU, the input of a plain linear map is recomputed in the backward pass, not saved. Norms of other classes or with hooks run as
    modules.

    x : Tensor [B,T,H,V]
    gate : Tensor [B,T,H*V]
    norm : nn.GroupNorm or RMSNorm
    grouped : bool
        True: the norm is a group norm, which takes [B*T,H*V]. False: it takes [B,T,H,V].

    Returns the result of the linear map for a Tensor [B,T,H*V].
    """
    B, T, H, V = x.shape
    weight, bias, eps = (getattr(norm, name, None) for name in ("weight", "bias", "eps"))
    if not runs_as_written(norm, nn.GroupNorm if grouped else RMSNorm) or eps is None or (grouped and (weight is None or bias is None)):
        return activated(gate, norm_of_heads(x, norm, grouped=grouped), "silu", then)
    weights = plain_weights([then]) if torch.is_grad_enabled() else None
    launch = kernels("launch", x, gate, weight, bias, *weights or ()) if V <= 2048 else None
    maps = [] if launch is None else [one for one in as_products(*weights or ()) if one.dtype == x.dtype]
    formula = partial(norm_gate_formula, eps=eps, centre=grouped)
    flat, gates = x.flatten(0, 1), gate.reshape(B * T, H, V)
    per_head = [None if one is None else one.reshape((V,) if one.numel() == V else (H, V)).contiguous() for one in (weight, bias)]
    if launch is None:
        found = formula(flat, gates, *per_head)
    else:
        function = launch.NormGateLinear if maps else launch.NormGate
        found = function.apply(flat.contiguous(), gates.contiguous(), *per_head, *maps, eps, grouped, formula)
    y: Tensor = found.view(B, T, -1) if maps else then(found.view(B, T, H * V))
    return y


def norm_of_heads(x: Tensor, norm: nn.Module, *, grouped: bool) -> Tensor:
    """The norm of heads x [B,T,H,V] by its module, [B,T,H*V], in the dtype of its weight."""
    B, T, H, V = x.shape
    weight = getattr(norm, "weight", None)
    given = x if weight is None else x.to(weight.dtype)
    if grouped and runs_as_written(norm, nn.GroupNorm):  # its forward refuses heads of one value
        normed = torch.group_norm(given.reshape(B * T, H * V), norm.num_groups, weight, norm.bias, norm.eps)  # type: ignore[arg-type]
    else:
        normed = norm(given.reshape(B * T, H * V) if grouped else given)
    return normed.view(B, T, H * V)


def norm_gate_formula(
    x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, then: Tensor | None = None, *, eps: float, centre: bool
) -> Tensor:
    """``norm_gate`` of x and gate [R,H,V], in the dtype of the weight; ``then`` is the weight of a linear map of all heads."""
    R, H, V = x.shape
    if centre and weight is not None and bias is not None:
        # F.group_norm refuses heads of one value
        normed = torch.group_norm(x.reshape(R, H * V).to(weight.dtype), H, weight.reshape(-1), bias.reshape(-1), eps).view(x.shape)
    else:
        normed = F.rms_norm(x if weight is None else x.to(weight.dtype), (V,), weight, eps)
    y = normed * F.silu(gate)
    return y if then is None else linear(y.flatten(1), then)


def add_norm(
    x: Tensor, y: Tensor | None, norm: nn.Module, *, in_float32: bool = False, rounded: bool = True, halvings: int = 0
) -> tuple[Tensor, Tensor]:
    """The sum of x and y [B,T,C], or x without y, and its norm. Norms of other classes or with hooks run as modules.

    in_float32 : bool
        The sum is float32, whatever the dtype of the norm.
    rounded : bool
        Under autocast, a kernel returns the norm in autocast's dtype, to which linear maps would round it. False: in the weight's dtype.
    halvings : int
        How many times x and y were divided by 2. The norm is that of the undivided sum, except for eps of norms that run as modules.
    """
    found, kind = norm_of(norm, halvings), x.device.type
    if found is not None and x.shape[-1] <= (2**13 if torch.is_grad_enabled() else 2**14):
        weight, bias, eps, centre = found
        launch = kernels("launch", x, y, weight, bias)
        mixed = launch is not None and autocasting(kind)
        if launch is not None and (mixed or in_float32 or all(one is None or one.dtype == x.dtype for one in (y, weight, bias))):
            dtype = torch.get_autocast_dtype(kind) if mixed and rounded else weight.dtype
            flat = [None if one is None else one.reshape(-1, x.shape[-1]).contiguous() for one in (x, y)]
            options = eps, centre, dtype
            if torch.is_grad_enabled():
                formula = partial(norm_formula, eps=eps, centre=centre, dtype=dtype)
                total, normed = launch.AddNorm.apply(*flat, weight, bias, *options, formula)
                again(normed, lambda total, *given: launch.add_norm(total, None, *given, *options)[1], total, weight, bias)
            else:
                total, normed = launch.add_norm(*flat, weight, bias, *options)
            return total.view(x.shape), normed.view(x.shape)
    total = x if y is None else x + y
    given = total.to(next(chain(norm.parameters(), norm.buffers()), total).dtype) if in_float32 else total
    if found is None:
        return total, norm(given)
    weight, bias, eps, centre = found
    normed = _norm_as_written(given, weight, bias, eps=eps, centre=centre) if halvings else norm(given)
    # in the backward pass the module may have other parameters, for example after torch.func.functional_call
    return total, again(normed, partial(_norm_as_written, eps=eps, centre=centre), given, weight, bias)


def _norm_as_written(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, centre: bool) -> Tensor:
    """The norm, bitwise equal to ``nn.LayerNorm`` and ``RMSNorm``."""
    if centre:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps)


def norm_formula(
    total: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, centre: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """``add_norm`` of the sum, with the norm rounded to ``dtype``."""
    wide = torch.promote_types(total.dtype, weight.dtype)
    x, (scale, offset) = total.to(wide), (None if one is None else one.to(wide) for one in (weight, bias))
    normed = F.layer_norm(x, weight.shape, scale, offset, eps) if centre else F.rms_norm(x, weight.shape, scale, eps)
    return total, normed if dtype is None else normed.to(dtype)


def norm_of(norm: nn.Module, halvings: int = 0) -> tuple[Tensor, Tensor | None, float, bool] | None:
    """The contiguous weight and bias of a norm, its epsilon, whether it is a layer norm. None: only the module can compute it.

    The epsilon is the one for an input that was divided by 2 ``halvings`` times.
    """
    if not runs_as_written(norm, nn.LayerNorm, RMSNorm) or norm.weight is None or norm.eps is None:
        return None
    bias = getattr(norm, "bias", None)
    weights = [None if one is None else one.contiguous() for one in (norm.weight, bias)]  # type: ignore[operator]
    return *weights, norm.eps * 0.25**halvings, isinstance(norm, nn.LayerNorm)  # type: ignore[return-value,operator]


class TokensBefore(NamedTuple):
    """The token before each token."""

    x: Tensor
    """[B,T,C]"""


Activation = Literal["sigmoid", "silu", "relu_squared"]


def activated(a: Tensor, b: Tensor | None, activation: Activation, then: nn.Module | None = None) -> Tensor:
    """``activation(a) * b`` element by element, for "relu_squared" ``relu(a)**2`` without b; then, if given, a linear map.

    On a GPU with a plain linear map, the activation is recomputed in the backward pass, not saved. Exception: ``relu(a)**2`` is saved
    instead of a, because its square root is all that the backward pass needs of a. In float16, small squares are 0.
    """
    weights = None if then is None else plain_weights([then])
    if then is not None and (weights is None or not torch.is_grad_enabled()):
        y: Tensor = then(activated(a, b, activation))
        return y
    weight = weights[0] if weights else None
    formula = partial(activated_formula, activation=activation)
    launch = kernels("launch", a, b, weight)
    if launch is not None and weight is not None:
        (weight,) = as_products(weight)
    same = (b is None or (a.shape == b.shape and a.dtype == b.dtype)) and (weight is None or weight.dtype == a.dtype)
    if launch is None or not same:
        return formula(a, b, weight)
    a, b = a.contiguous(), None if b is None else b.contiguous()
    found: Tensor
    if b is None and a.dtype != torch.float16:
        found = launch.ReluSquared.apply(a)
        return found if weight is None else linear(found, weight)
    if weight is None or not torch.is_grad_enabled():
        found = launch.Activated.apply(a, b, activation, formula)
        return found if weight is None else linear(found, weight)
    else:
        found = launch.ActivatedLinear.apply(a, b, weight, activation, formula)
    return found


def activated_formula(a: Tensor, b: Tensor | None, weight: Tensor | None = None, *, activation: Activation) -> Tensor:
    """``activated``."""
    if b is None:
        y = torch.relu(a).square()
    else:
        y = (sigmoid(a) if activation == "sigmoid" else F.silu(a)) * b
    return y if weight is None else linear(y, weight)


def decay(x: Tensor, bias: Tensor) -> Tensor:
    """The log decay ``-exp(bias + x)``, float32 (float64 for float64 x): x [...,C], bias of C elements."""
    launch = kernels("launch", x, bias)
    given = x.flatten(0, -2).contiguous(), bias.reshape(-1).contiguous()
    function = decay_formula if launch is None else lambda *given: launch.Decay.apply(*given, decay_formula)
    return again(function(*given), function, *given).view(x.shape)


def low_rank_decay(hidden: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    """``decay`` of ``tanh(hidden) up``: hidden [...,M], up [M,C]."""
    plain = torch.is_grad_enabled() or up.shape[0] > 128 or hidden.dtype != up.dtype
    launch = None if plain else kernels("few_rows_launch", hidden, up, bias)
    if launch is None:
        low, base = tanh(hidden), up.T
        return decay(again(linear(low, base), F.linear, low, base), bias)
    flat = hidden.flatten(0, -2).contiguous()
    rows, base = up.contiguous(), bias.reshape(-1).contiguous()
    found: Tensor = launch.low_rank_decay(flat, rows, base, early=ready((up, bias), (rows, base)))
    return found.view(*hidden.shape[:-1], up.shape[1])


def decay_formula(x: Tensor, bias: Tensor) -> Tensor:
    """``decay``."""
    dtype = state_dtype(x.dtype)
    return -torch.exp(bias.to(dtype).reshape(-1) + x.to(dtype))


def log_sigmoid(x: Tensor, normalizer: float) -> Tensor:
    """The log decay ``logsigmoid(x) / normalizer``, float32 (float64 for float64 x)."""
    formula, launch = partial(log_sigmoid_formula, normalizer=normalizer), kernels("launch", x)
    function = formula if launch is None else lambda x: launch.LogSigmoid.apply(x, float(normalizer), formula)
    x = x.contiguous()
    return again(function(x), function, x)


def log_sigmoid_formula(x: Tensor, *, normalizer: float) -> Tensor:
    """``log_sigmoid``."""
    return F.logsigmoid(x.to(state_dtype(x.dtype))) / normalizer
