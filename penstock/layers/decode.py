"""Fused kernels of RWKV's updates in place, around its linear maps: a norm, a token shift, low-rank maps or a recurrence in one kernel.

The last form of these chains returns None and changes nothing: the caller then computes the parts by other chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..call import private
from . import decode_examples
from .chains import Chain, ChainForm, native, plain
from .cpu import decode as natively
from .cpu import refusal as refusal_of_native
from .cpu.linear import ROWS, Product, products, refuses_rows
from .decode_examples import OneRow, ShiftedNorm, Step
from .fused import NormParts, norm_of
from .linear import called, plain_weights
from .modes import mode, ready, refuses_graph
from .norms import refuses_group_norm
from .token_shift import Shifted
from .triton import absent, launching, refusal

if TYPE_CHECKING:
    from .sequences import Sequences

SHIFTED_TOKENS = 1024
"""The most tokens for ``shifted_norm``. For more, ``token_shift`` computes all interpolations of a token together: it moves fewer bytes."""
WIDTH = 2048
"""The hidden size C for which ``low_rank_maps`` and ``channel_mix`` run, that of RWKV-6 1.6B. Together they save 6 to 7 % of a step of one
token on an NVIDIA H200. ``low_rank_maps`` followed by other maps, or with more tokens, is slower. Other sizes were not measured."""


def refuses_update(sequences: Sequences) -> str | None:
    """Why a call is not an update in place without gradients and autocast, or None."""
    if torch.is_grad_enabled():
        return "gradients are on"
    if not sequences.in_place:
        return "states are not updated in place"
    return "autocast is on" if private.autocasting() else None


def refuses_step(sequences: Sequences) -> str | None:
    """Why a call is not a decode step in a graph, or None."""
    return refuses_graph(mode()) or refuses_update(sequences) or (None if sequences.single else "it takes one token per sequence")


def refuses_native_step(function: str, tensors: Sequence[Tensor | None], pool: Tensor, sequences: Sequences) -> str | None:
    """Why a native kernel does not compute a decode step of these tensors, the pool aside, or None."""
    if (why := refusal_of_native(function, (*tensors, pool))) is not None:
        return why
    if (why := refuses_update(sequences)) is not None:
        return why
    if not sequences.single:
        return "it takes one token per sequence"
    if mode().alike:
        return "the call is inside rows_alike"
    slots, count = sequences.slots, sequences.count
    if not private.fast((slots,)):
        return "slots are of a subclass, or lazily negated"
    if tensors[0].shape[:-1] != (count, 1) or (slots is not None and len(slots) != count):  # type: ignore[union-attr]
        return "there is not one token, and one slot, for each sequence"
    return None if pool.shape[0] >= (count if slots is None else 1) else "the pool has no row for a sequence"


def shifted_norm(
    x: Tensor, y: Tensor | None, norm: Any, pool: Tensor, sequences: Sequences, *factors: Tensor, complement: bool = False,
    kept: bool = False,
) -> Any:  # fmt: skip
    """``add_norm`` and ``token_shift`` for updates in place in one kernel, which writes the last tokens to the pool of shift states.

    Returns a ``Shifted``. ``complement``: the factors are 1 - factors_i. ``kept``: also return the norm and the previous
    tokens.
    """
    return SHIFTED_NORM(ShiftedNorm(x, y, norm, pool, sequences, factors, complement, kept))


def _refuses_shifted_norm(c: ShiftedNorm) -> str | None:
    x, y, sequences = c.x, c.y, c.sequences
    if (why := refuses_update(sequences)) is not None:
        return why
    if not (sequences.single or mode().alike or x.shape[0] * x.shape[1] <= SHIFTED_TOKENS):
        return f"token_shift is faster for more than {SHIFTED_TOKENS} tokens"
    if isinstance(parts := norm_of(c.norm, sequences.halvings), str):
        return f"the norm {parts}"
    if not c.fits(parts):
        return "there are no tokens, or sizes differ"
    if (why := refusal(x, y, parts.weight, parts.bias, c.pool, *c.factors)) is not None:
        return why
    if parts.weight.dtype != x.dtype or (y is not None and y.dtype != x.dtype):
        return "tokens, the residual and the norm must have one dtype"
    if x.shape[-1] > 2**14:
        return f"it takes at most {2**14} channels, got {x.shape[-1]}"
    if len(c.factors) > (most := launching("few_rows_launch").SHIFTS):
        return f"it takes at most {most} factors, got {len(c.factors)}"
    return None if c.pool.stride(1) == 1 else "rows of the pool must be contiguous"


def _shifted_norm(c: ShiftedNorm) -> Any:
    x, norm, sequences, launch = c.x, c.norm, c.sequences, launching("few_rows_launch")
    parts = norm_of(norm, sequences.halvings)
    assert not isinstance(parts, str)
    flat = [None if one is None else one.reshape(-1, x.shape[-1]).contiguous() for one in (x, c.y)]
    slots = None if sequences.slots is None else sequences.slots.contiguous()
    mu = [one.reshape(-1).contiguous() for one in c.factors]
    early = ready((norm.weight, getattr(norm, "bias", None), *c.factors), (parts.weight, parts.bias, *mu))
    spans = None if sequences.single else (sequences.starts, sequences.bounds)
    options = {"centre": parts.centre, "complement": c.complement, "kept": c.kept, "early": early}
    found = launch.shifted_norm(*flat, parts.weight, parts.bias, parts.eps, c.pool, slots, mu, spans, **options)
    total, normed, before = (one.view(x.shape) for one in found[:3])
    return Shifted(total, normed, before, tuple(one.view(x.shape) for one in found.mixed))


def _refuses_shifted_norm_natively(c: ShiftedNorm) -> str | None:
    x, y = c.x, c.y
    if not x.is_cpu:
        return "its tensors are not on a CPU"
    if isinstance(parts := norm_of(c.norm, c.sequences.halvings), str):
        return f"the norm {parts}"
    if (why := refuses_native_step("shifted_norm", (x, y, parts.weight, parts.bias, *c.factors), c.pool, c.sequences)) is not None:
        return why
    if not c.fits(parts):
        return "there are no tokens, or sizes differ"
    return natively.refuses_shift(x, y, [one for one in parts[:2] if one is not None], c.factors)


def _shifted_norm_natively(c: ShiftedNorm) -> Any:
    parts, y = norm_of(c.norm, c.sequences.halvings), c.y
    assert not isinstance(parts, str)
    weight, bias, eps, centre = parts
    mu = [one.contiguous() for one in c.factors]
    options = {"centre": centre, "complement": c.complement, "kept": c.kept}
    x = c.x.contiguous()
    return Shifted(
        *natively.shifted_norm(x, None if y is None else y.contiguous(), weight, bias, eps, c.pool, c.sequences.places, mu, **options)
    )  # fmt: skip


def _nothing(call: Any) -> Any:
    """The last form: parts are computed by other chains."""
    return None


PARTS: ChainForm[Any, Any] = plain("parts", _nothing)
SHIFTED_NORM: Chain[ShiftedNorm, Any] = Chain(
    "shifted_norm",
    native(
        "native", "shifted_norm", _shifted_norm_natively, _refuses_shifted_norm_natively, decode_examples.SINGLE_SHIFTED_NORM
    ),
    ChainForm(
        "shifted_norm", _shifted_norm, _refuses_shifted_norm, lambda c: ("penstock_shifted_norm",), decode_examples.SHIFTED_NORM
    ),
    PARTS,
    formula=decode_examples.shifted_norm,
    results=lambda c, found: (found.total, found.mixed, (found.normed, found.before) if c.kept else (), c.pool),
)  # fmt: skip


def _refuses_row(c: OneRow) -> str | None:
    """Why there is no kernel for one token in a graph whose kernels may read all parameters early, or None."""
    x, y, sequences = c.x, c.y, c.sequences
    if (why := refuses_step(sequences)) is not None:
        return why
    if x.shape != (1, 1, WIDTH) or sequences.slots is None:
        return f"it takes one token of {WIDTH} channels with a slot, got {x.shape[0] * x.shape[1]} of {x.shape[2]}"
    if (why := next((found for one in c.maps if (found := called(one)) is not None), None)) is not None:
        return f"a linear map {why}"
    if isinstance(parts := norm_of(c.norm, sequences.halvings), str):
        return f"the norm {parts}"
    learned = _learned(c, parts)
    if (why := refusal(x, y, c.pool, *learned)) is not None:
        return why
    if (why := _absent(x.device)) is not None:
        return why
    if x.element_size() != 2 or any(one.dtype != x.dtype for one in (*learned, x if y is None else y)):
        return "it takes one dtype of 16 bits"
    if not all(one.is_contiguous() for one in learned) or not ready(learned, learned):
        return "weights must be contiguous parameters"
    return None if c.pool.shape[0] and c.pool.stride(1) == 1 else "rows of the pool must be contiguous"


def _absent(device: torch.device) -> str | None:
    """Why a device has no kernels of one token, or None."""
    if (why := absent(device)) is not None:
        return why
    if launching("few_rows_launch").on_hopper(device, "hopper_one_row_launch") is None:
        return "its code is for sm_90 (Hopper), in Triton's Gluon"
    return None


def _learned(c: OneRow, parts: NormParts) -> list[Tensor]:
    bias = None if parts.bias is None else c.norm.bias
    given = c.norm.weight, bias, *c.factors, *(c.low_rank or ()), *(plain_weights(c.maps) or ())
    return [one for one in given if one is not None]


def _row(c: OneRow) -> tuple[Any, Any, list[Tensor]]:
    """The launching module, its ``Shift``, and the weights of the maps."""
    x, sequences, weights = c.x, c.sequences, plain_weights(c.maps)
    parts = norm_of(c.norm, sequences.halvings)
    assert not isinstance(parts, str) and sequences.slots is not None and weights is not None  # noqa: PT018
    launch = launching("few_rows_launch").on_hopper(x.device, "hopper_one_row_launch")
    flat = [None if one is None else one.reshape(1, -1).contiguous() for one in (x, c.y)]
    mu = [one.view(-1) for one in c.factors]
    shift = launch.Shift(*flat, *parts, c.pool, sequences.slots.contiguous(), mu)
    return launch, shift, weights


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
    return LOW_RANK_MAPS(OneRow(x, y, norm, pool, sequences, factors, maps, (mu, down, up, decay)))


def _refuses_low_rank_maps(c: OneRow) -> str | None:
    if (why := _refuses_row(c)) is not None:
        return why
    assert c.low_rank is not None
    launch = launching("few_rows_launch").on_hopper(c.x.device, "hopper_one_row_launch")
    _, _, up, decay = c.low_rank
    return None if launch.takes_low_rank(up, [decay.T, *(plain_weights(c.maps) or ())]) else "it does not take weights of these sizes"


def _low_rank_maps(c: OneRow) -> tuple[Tensor, list[Tensor], Any]:
    launch, shift, weights = _row(c)
    assert c.low_rank is not None
    mu, down, up, decay = c.low_rank
    total, results, lasts = launch.low_rank_maps(shift, mu.view(-1), down, up, [decay.T, *weights])
    return total.view(c.x.shape), [one[None] for one in results], lasts


def _of_low_rank_maps(c: OneRow, found: Any) -> Any:
    """The results, the new row, which the caller writes, and the pool, which is as before."""
    total, results, lasts = found
    return total, results, lasts.normed, c.pool


LOW_RANK_MAPS: Chain[OneRow, tuple[Tensor, list[Tensor], Any] | None] = Chain(
    "low_rank_maps",
    ChainForm(
        "low_rank_maps", _low_rank_maps, _refuses_low_rank_maps, lambda c: ("penstock_shifted_low_rank", "penstock_products_hopper"),
        decode_examples.LOW_RANK_MAPS, _absent,
    ),
    PARTS,
    formula=decode_examples.low_rank_maps,
    results=_of_low_rank_maps,
)  # fmt: skip


def channel_mix(
    x: Tensor, y: Tensor | None, norm: Any, pool: Tensor, sequences: Sequences, factors: Sequence[Tensor], maps: Sequence[nn.Module]
) -> tuple[Tensor, Tensor] | None:
    """The sum x + y, and RWKV-6's channel mix of its norm, in two kernels. ``maps``: key, receptance and value."""
    return CHANNEL_MIX(OneRow(x, y, norm, pool, sequences, factors, maps))


def _refuses_channel_mix(c: OneRow) -> str | None:
    if c.sequences.halvings:
        return "the residual stream is divided"
    if (why := _refuses_row(c)) is not None:
        return why
    launch = launching("few_rows_launch").on_hopper(c.x.device, "hopper_one_row_launch")
    return None if launch.takes_channel_mix(*(plain_weights(c.maps) or ())) else "it does not take weights of these sizes"


def _channel_mix(c: OneRow) -> tuple[Tensor, Tensor]:
    launch, shift, weights = _row(c)
    total, mixed = launch.channel_mix(shift, *weights)
    return total.view(c.x.shape), mixed.view(c.x.shape)


CHANNEL_MIX: Chain[OneRow, tuple[Tensor, Tensor] | None] = Chain(
    "channel_mix",
    ChainForm(
        "channel_mix", _channel_mix, _refuses_channel_mix, lambda c: ("penstock_shifted_products", "penstock_products_hopper"),
        decode_examples.CHANNEL_MIX, _absent,
    ),
    PARTS,
    formula=decode_examples.channel_mix,
    results=lambda c, found: (found, c.pool),
)  # fmt: skip


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
    return RWKV_STEP(Step(r, k, v, gate, u, bias, norm, pool, sequences, low_rank, lasts))


def _refuses_parts(c: Step) -> str | None:
    """Why no kernel takes this norm and these sizes, or None."""
    if (why := refuses_group_norm(c.norm, c.pool.shape[1])) is not None:
        return f"the norm {why}"
    return None if c.fits else "sizes differ"


def _refuses_rwkv_step(c: Step) -> str | None:
    if (why := refuses_step(c.sequences)) is not None:
        return why
    norm, (low, up), (K, V) = c.norm, c.low_rank or (None, None), c.pool.shape[2:]
    if (why := _refuses_parts(c)) is not None:
        return why
    activations = [x for x in (c.r, c.k, c.v, c.gate, low) if x is not None]
    weights = [x for x in (norm.weight, norm.bias, up) if x is not None]
    if (why := refusal(*activations, *weights, c.u, c.bias, c.pool)) is not None:
        return why
    if any(x.dtype != c.r.dtype for x in activations):
        return "all activations must have one dtype"
    learned = [*weights, c.u, c.bias]
    if not all(x.is_contiguous() for x in weights) or not ready(learned, learned):
        return "weights must be contiguous parameters"
    M = 0 if up is None else up.shape[0]
    if c.pool.shape[0] == 0 or max(K, V, M) > 512 or max(K * V, K * M) > 2**14:
        return f"it takes heads whose state has at most {2**14} elements, got K = {K}, V = {V}"
    return None


def _rwkv_step(c: Step) -> Tensor:
    (H, K, V), (low, up), slots = c.pool.shape[1:], c.low_rank or (None, None), c.sequences.slots
    u, bias, norm = c.u.expand(H, K), c.bias.view(H, -1).expand(H, K), c.norm
    slots = None if slots is None else slots.contiguous()
    low = None if low is None else low.flatten(0, 1).contiguous()
    heads = [x.reshape(x.shape[0], H, size).contiguous() for x, size in ((c.r, K), (c.k, K), (c.v, V), (c.gate, V))]
    launch = launching("few_rows_launch")
    found: Tensor = launch.rwkv_step(*heads, u, bias, low, up, c.pool, slots, norm.weight, norm.bias, norm.eps, lasts=c.lasts)
    return found.view(c.v.shape)


def _refuses_rwkv_step_natively(c: Step) -> str | None:
    if not c.r.is_cpu:
        return "its tensors are not on a CPU"
    norm, (low, up) = c.norm, c.low_rank or (None, None)
    if (why := _refuses_parts(c)) is not None:
        return why
    tokens = [x for x in (c.r, c.k, c.v, c.gate, low, up) if x is not None]
    learned = [norm.weight, norm.bias]
    if (why := refuses_native_step("rwkv_step", (*tokens, *learned, c.u, c.bias), c.pool, c.sequences)) is not None:
        return why
    if c.lasts is not None:
        return "it replaces no rows of shift states"
    if low is not None and up is not None and not (up.is_contiguous() and refuses_rows(low, [up]) is None):
        return f"it takes fewer than {ROWS} tokens, and contiguous weights"
    return natively.refuses_step(tokens, learned)


def _rwkv_step_natively(c: Step) -> Tensor:
    (H, K), norm, low = c.pool.shape[1:3], c.norm, None
    if c.low_rank is not None:
        hidden, up = c.low_rank
        (low,) = products([Product(hidden, up, "tanh", transposed=True)])
    r, k, v, gate = (one.contiguous() for one in (c.r, c.k, c.v, c.gate))
    u, bias = c.u.expand(H, K), c.bias.view(H, -1).expand(H, K)
    weight, shift = norm.weight.contiguous(), norm.bias.contiguous()
    return natively.rwkv_step(r, k, v, gate, u, bias, low, c.pool, c.sequences.places, weight, shift, norm.eps)


RWKV_STEP: Chain[Step, Tensor | None] = Chain(
    "rwkv_step",
    native("native", "rwkv_step", _rwkv_step_natively, _refuses_rwkv_step_natively, decode_examples.EAGER_RWKV_STEP),
    ChainForm("rwkv_step", _rwkv_step, _refuses_rwkv_step, lambda c: ("penstock_rwkv_step",), decode_examples.RWKV_STEP),
    PARTS,
    formula=decode_examples.rwkv_step,
    results=lambda c, found: (found, c.pool),
)
