"""Fused kernels of RWKV-7's decode steps, around its linear maps, as those of ``decode``.

The last form of these chains returns None and changes nothing: the caller then computes the parts by other chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..tokens.dtypes import state_dtype
from .activations import sigmoid, tanh
from .chains import Chain, ChainForm
from .chains import native as native_form
from .cpu import refusal as refusal_of_native
from .cpu import rwkv7 as native
from .cpu.linear import Product, products, refuses_rows
from .decode import PARTS, refuses_native_step, refuses_step
from .examples import HALF, Draw, examples
from .linear import linear
from .modes import in_graph, mode, ready, refuses_graph, rows_alike
from .norms import refuses_group_norm
from .rwkv7_chains import Learned, Mixed, RecurrenceCall, drawn_inputs, inputs_formula
from .sequences import Sequences, drawn
from .triton import launching, refusal

ACTIVATIONS = {"tanh": tanh, "sigmoid": sigmoid}
LARGEST = 128
"""The most channels of a head of ``rwkv7_step``: the state is in registers."""


class LowRankMap(NamedTuple):
    """activation(x down) up."""

    x: Tensor
    """[B,T,C]"""
    down: Tensor
    """[C,M]"""
    up: Tensor
    """[M,N]"""
    activation: str | None = None
    """"tanh", "sigmoid" or None."""


def low_rank_map(one: LowRankMap, hidden: Tensor | None = None) -> Tensor:
    """A low-rank map; ``hidden`` is x down, if it is known."""
    hidden = linear(one.x, one.down.T) if hidden is None else hidden
    return linear(hidden if one.activation is None else ACTIVATIONS[one.activation](hidden), one.up.T)


def low_rank_maps(*maps: LowRankMap, hidden: Sequence[Tensor] = ()) -> list[Tensor] | None:
    """Low-rank maps of few tokens, on a CPU or in a graph: [B,T,N] of each. In two launches, or one if all ``hidden`` x down are known."""
    return RWKV7_LOW_RANK(_Maps(maps, tuple(hidden)))


class _Maps(NamedTuple):
    """The arguments of ``low_rank_maps``."""

    maps: tuple[LowRankMap, ...]
    hidden: tuple[Tensor, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the inputs have one shape, which fits the weights."""
        shape = self.maps[0].x.shape
        if any(one.x.shape != shape or one.down.shape != (shape[-1], len(one.up)) or one.up.dim() != 2 for one in self.maps):
            return False
        return all(low.shape == (*shape[:-1], len(one.up)) for low, one in zip(self.hidden, self.maps))


def _refuses_maps(c: _Maps) -> str | None:
    alike = mode().alike and bool(c.hidden)
    if not alike and (why := refuses_graph(mode())) is not None:
        return why
    if torch.is_grad_enabled():
        return "gradients are on"
    weights = [one for each in c.maps for one in ((each.up,) if c.hidden else each[1:3])]
    tensors = [*weights, *(c.hidden or (one.x for one in c.maps))]
    if (why := refusal(*tensors)) is not None:
        return why
    if not c.fits:
        return "sizes differ"
    x, launch = c.maps[0].x, launching("rwkv7_step_launch")
    if x.element_size() != 2 or any(one.dtype != x.dtype for one in tensors):
        return "it takes one dtype of 16 bits"
    most = launch.HIDDEN_ROWS if c.hidden else launch.ROWS
    if not (0 < (rows := x.shape[0] * x.shape[1]) <= most or (alike and rows)):
        return f"it takes at most {most} tokens, got {rows}"
    if len(c.maps) > launch.PARTS:
        return f"it takes at most {launch.PARTS} maps, got {len(c.maps)}"
    return None if all(one.numel() and one.is_contiguous() for one in weights) else "weights must be contiguous"


def _refuses_maps_natively(c: _Maps) -> str | None:
    x = c.maps[0].x
    if not x.is_cpu:
        return "its tensors are not on a CPU"
    tensors = [*c.hidden, *(one.x for one in c.maps), *(one.down for one in c.maps), *(one.up for one in c.maps)]
    if (why := refusal_of_native("products", tensors, alike=True)) is not None:
        return why
    if not c.fits:
        return "sizes differ"
    weights = [one for each in c.maps for one in each[1:3]]
    return refuses_rows(x, weights) if all(one.is_contiguous() for one in weights) else "weights must be contiguous"


def _maps_natively(c: _Maps) -> list[Tensor]:
    hidden = c.hidden or products([Product(one.x, one.down, transposed=True) for one in c.maps])
    return products([Product(low, one.up, one.activation, transposed=True) for low, one in zip(hidden, c.maps)])


def _by_kernels(c: _Maps) -> list[Tensor]:
    x, downs, ups, kinds = zip(*c.maps)
    rows, launch = [one.reshape(-1, one.shape[-1]).contiguous() for one in c.hidden or x], launching("rwkv7_step_launch")
    early = ready(ups, ups)
    if c.hidden:
        found: list[Tensor] = launch.low_rank_ups(rows, ups, kinds, alike=mode().alike, early=early)
    else:
        found = launch.low_rank_maps(rows, downs, ups, kinds, early=early)
    return [y.view(*x[0].shape[:-1], -1) for y in found]


def _draw_maps(draw: Draw, known: bool = False) -> _Maps:
    C, N = draw.size(40, 2048), draw.size(72, 2048)
    ranks = zip((draw.size(8, 96), draw.size(24, 64), draw.size(8, 96), draw.size(40, 256)), ("tanh", None, None, "sigmoid"))
    parts = [(draw(f"x {n}", 3, 1, C), draw.learned(f"down {n}", C, M, scale=C**-0.5), M, kind) for n, (M, kind) in enumerate(ranks)]
    maps = tuple(LowRankMap(x, down, draw.learned(f"up {n}", M, N, scale=M**-0.5), k) for n, (x, down, M, k) in enumerate(parts))
    return _Maps(maps, tuple(draw(f"hidden {n}", 3, 1, one.down.shape[1]) for n, one in enumerate(maps)) if known else ())


RWKV7_LOW_RANK: Chain[_Maps, list[Tensor] | None] = Chain(
    "rwkv7_low_rank",
    native_form(
        "native", "products", _maps_natively, _refuses_maps_natively,
        (*examples(_draw_maps, gradients=False), *examples(partial(_draw_maps, known=True), gradients=False)),
    ),
    ChainForm(
        "low_rank_products", _by_kernels, _refuses_maps, lambda c: ("penstock_low_rank_products",),
        (
            *examples(_draw_maps, *HALF, gradients=False, within=in_graph),
            *examples(partial(_draw_maps, known=True), *HALF, gradients=False, within=in_graph),
            *examples(partial(_draw_maps, known=True), *HALF, gradients=False, within=rows_alike),
        ),
    ),
    PARTS,
    formula=lambda c: [low_rank_map(one, hidden) for one, hidden in zip(c.maps, c.hidden or [None] * len(c.maps))],
)  # fmt: skip


def rwkv7_step(
    r: Tensor, k: Tensor, w: Tensor, rate: Tensor, learned: Learned, v: Tensor | Mixed, gate: Tensor, norm: nn.GroupNorm, pool: Tensor,
    sequences: Sequences,
) -> Tensor | None:  # fmt: skip
    """A decode step as one kernel: ``recurrence_inputs``, the recurrence in place, and ``norm_gate`` of its output.

    On a CPU, or on a GPU in a graph.

    pool : Tensor [P,H,N,N]
        The states; row ``slots[n]`` is updated in place.

    Other arguments as for these functions. Returns a Tensor [B,1,H*N].
    """
    mixed = v if isinstance(v, Mixed) else None
    inputs = RecurrenceCall(r, k, w, rate, learned, mixed)
    return RWKV7_STEP(Step(inputs, r if isinstance(v, Mixed) else v, gate, norm, pool, sequences))


class Step(NamedTuple):
    """The arguments of ``rwkv7_step``."""

    inputs: RecurrenceCall
    values: Tensor
    """v, if it is not mixed."""
    gate: Tensor
    norm: nn.GroupNorm
    pool: Tensor
    sequences: Sequences


def _refuses_parts(c: Step) -> str | None:
    """Why no kernel takes this norm and these sizes, or None."""
    H, N = c.inputs.learned.r_k.shape
    if (why := refuses_group_norm(c.norm, H)) is not None:
        return f"the norm {why}"
    shape = c.inputs.r.shape
    fits = c.inputs.fits and c.values.shape == c.gate.shape == shape and c.norm.weight.numel() == c.norm.bias.numel() == H * N
    return None if fits and c.pool.shape[1:] == (H, N, N) else "sizes differ"


def _refuses(c: Step) -> str | None:
    if (why := refuses_step(c.sequences) or _refuses_parts(c)) is not None:
        return why
    if (N := c.inputs.learned.r_k.shape[1]) > LARGEST:
        return f"it takes heads of at most {LARGEST} channels, got {N}"
    tokens = [*c.inputs.tokens, c.values, c.gate]
    learned = [*c.inputs.parameters, c.norm.weight, c.norm.bias]
    if (why := refusal(*tokens, *learned, c.pool)) is not None:
        return why
    if any(one.dtype != c.gate.dtype for one in tokens):
        return "all tokens must have one dtype"
    if not all(one.is_contiguous() for one in learned) or not ready(learned, learned):
        return "weights must be contiguous parameters"
    return None if c.pool.shape[0] else "the pool has no rows"


def _by_kernel(c: Step) -> Tensor:
    launch, norm, slots = launching("rwkv7_step_launch"), c.norm, c.sequences.slots
    given = launch.Given(*c.inputs.rows)
    gate, values = (one.reshape(given.r.shape).contiguous() for one in (c.gate, c.values))
    slots = None if slots is None else slots.contiguous()
    y: Tensor = launch.rwkv7_step(given, gate, values, norm.weight, norm.bias, norm.eps, c.pool, slots)
    return y.view(c.gate.shape)


def _refuses_native(c: Step) -> str | None:
    if not c.gate.is_cpu:
        return "its tensors are not on a CPU"
    if (why := _refuses_parts(c)) is not None:
        return why
    tokens, learned = [*c.inputs.tokens, c.values, c.gate], [*c.inputs.parameters, c.norm.weight, c.norm.bias]
    if (why := refuses_native_step("rwkv7_step", (*tokens, *learned), c.pool, c.sequences)) is not None:
        return why
    if not native.takes(tokens, learned, c.pool):
        return "it takes contiguous tokens and weights, each of one dtype, not float64"
    return None


def _by_native(c: Step) -> Tensor:
    i = c.inputs
    v, mix, first, v0 = i.mixed or (c.values, None, None, None)
    learned = (*i.learned, v0, c.norm.weight, c.norm.bias)
    return native.rwkv7_step((i.r, i.k, i.w, i.rate, v, mix, first, c.gate), learned, c.norm.eps, c.pool, c.sequences.places)


def step_formula(c: Step) -> Any:
    """``rwkv7_step``, and the pool."""
    dtype, H = state_dtype(c.gate.dtype), c.inputs.learned.r_k.shape[0]
    tensors = [None if x is None else x.to(dtype) for x in c.inputs.rows]
    r, raw, key, a, b, share, *mixed = inputs_formula(*tensors)  # type: ignore[arg-type]
    v, gate = mixed[0] if mixed else c.values.to(dtype).view(r.shape), c.gate.to(dtype).view(r.shape)
    state = c.sequences.read(c.pool).to(dtype)
    removed = (a[..., None] * state).sum(2)
    new = b[..., None] * removed[..., None, :] + key[..., None] * v[..., None, :]
    state = state * torch.exp(-torch.sigmoid(raw) * torch.exp(raw.new_tensor(-0.5)))[..., None] + new
    o = (r[..., None] * state).sum(2)
    normed = torch.group_norm(o.flatten(1), H, c.norm.weight.to(dtype), c.norm.bias.to(dtype), c.norm.eps).view(r.shape)
    c.sequences.write((c.pool,), (state,))
    return ((normed + share[..., None] * v) * gate).to(c.gate.dtype).view(c.gate.shape), c.pool


def _draw(draw: Draw, mixed: bool = True) -> Step:
    inputs = drawn_inputs(draw, mixed, single=True)
    H, N = inputs.learned.r_k.shape
    norm, pool = draw.module("norm", nn.GroupNorm(H, H * N, 1e-3)), draw("pool", 5, H, N, N, wide=True)
    gate, values = (draw(name, 3, 1, H * N) for name in ("gate", "values"))
    return Step(inputs, values, gate, norm, pool, drawn(draw, gate, slots=[4, 0, 2], in_place=True))


RWKV7_STEP: Chain[Step, Tensor | None] = Chain(
    "rwkv7_step",
    native_form(
        "native", "rwkv7_step", _by_native, _refuses_native,
        (*examples(_draw, gradients=False), *examples(partial(_draw, mixed=False), gradients=False)),
    ),
    ChainForm(
        "rwkv7_step", _by_kernel, _refuses, lambda c: ("penstock_rwkv7_step",),
        (*examples(_draw, gradients=False, within=in_graph), *examples(partial(_draw, mixed=False), gradients=False, within=in_graph)),
    ),
    PARTS,
    formula=step_formula,
    results=lambda c, found: (found, c.pool),
)  # fmt: skip
