"""The chunk kernels for decays per channel on Hopper: ``channel_forward.py``, ``channel_backward.py`` and ``channel_backward_float32.py``.

At K = 256 there are not enough registers for the state and the tiles of all levels: a program has a block of 128 key channels, of float32
one of 64. Forward, ``blocks.py`` sums the outputs of blocks; backward, ``values.py`` computes dv from what the programs store.
"""

from __future__ import annotations

from typing import Any

import torch

from ....call.implementation import Example
from ....gpu.hopper import Tile, absent
from ....gpu.plan import Plan, Size
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import Backward, Call, Forward
from ..heads import MEDIUM, SMALL
from ..portable import blocks, values
from ..states import Segments, before_chunks, segments_before_chunks
from . import sm90, states
from .passes import BackwardForm, ForwardForm, gradients, gradients_of_operands, gradients_of_parameters, results, start, states_form

STAGES, SLOTS = 2, 4
"""Stages of tiles of q, k and v, and slots for tiles with factors. With these, two programs fit on a multiprocessor at K = 64."""
FORWARD_KEYS = {SMALL.value: (4, 136, 128), MEDIUM.value: (8, 152, 168)}
"""By K of a block: warps of ``prepare``, registers of their threads, and registers of every thread at launch. With fewer, ``prepare``
spills; with more, the warps that hold the state spill."""
FORWARD_FLOAT = (4, 240, 255)
"""The same of float32 at K = 64. One program fits on a multiprocessor. With 200, not 240, rwkv6 spills 88 bytes (compiled, not timed)."""
BACKWARD_KEYS = {SMALL.value: (8, 128), MEDIUM.value: (8, 255)}
"""By K of a block: warps, and registers of their threads. At K = 64 two programs fit on a multiprocessor."""
BACKWARD_FLOAT = (8, 255)
"""The same of float32 at K = 64. One program fits on a multiprocessor."""


def refuses_forward(call: Call) -> str | None:
    """Sizes of heads, layouts, and blocks of heads wider than 256 channels, whose outputs are float32."""
    count = sm90.blocks(call.p)
    reason = (
        sm90.other_decays(call)
        or sm90.size("K of a block", call.K // count, tuple(FORWARD_KEYS))
        or sm90.multiple("V", call.V, sm90.BV)
        or sm90.not_copied(call)
    )
    if reason is None and call.p.partial and count == 1:
        return "its outputs are 16 bits, those of a block of a wide head are float32"
    return reason


def avoids_forward(call: Call) -> str | None:
    """The tables select it."""
    config = call.config("forward")
    return sm90.plain_in_table(config) or (None if config.BV == sm90.BV else f"the table has {config.BV} value channels a program")


def launch_forward(
    plan: Plan, call: Call, count: Size, L: Size, output: str, final: str, chunk_states: str, first: str, steps: tuple[int, ...],
    slots: str = "q", fused: bool = True, **flags: Any,
) -> None:  # fmt: skip
    """Add the launch for ``count`` sequences or segments and, of heads in blocks, the sum of their outputs."""
    from ..sm90 import channel_forward

    p, splits, parts = call.p, sm90.blocks(call.p), sm90.parts(call.p)
    K, stored, in_tiles, in_rows = call.K // splits, output, output, sm90.decays_in_tiles(p)
    warps, registers, at_launch = FORWARD_FLOAT if parts else FORWARD_KEYS[K]
    if splits > 1:
        stored, in_tiles = plan.empty("outputs", batch, tokens, call.H * splits, call.V), "v"
    plan.launch(
        channel_forward.penstock_channel_fwd_sm90, call.programs(count, splits * (call.V // sm90.BV)),
        ("q", "k", "v", in_tiles, "g" if in_rows else "q", "g", "u", first, stored, final, chunk_states, "cu_seqlens", slots),
        (p.scale, sequences, tokens, L, call.H * splits, *call.gate, *call.bonus, *steps), 4,
        (*[Tile(sm90.C, K)] * 2, *[Tile(sm90.C, sm90.BV)] * 2, Tile(sm90.C, K)), at_launch, fused, flags["EARLY"],
        PREVIOUS=call.previous, PACKED=call.packed, **flags, K=K, V=call.V, BLOCKS=splits, STAGES=STAGES, SLOTS=SLOTS, WARPS=warps,
        REGISTERS=registers, TILED=in_rows, STATIC="T" not in p.variant.decay, PARTS=parts,
    )  # fmt: skip
    if splits > 1:
        blocks.add(plan, stored, output, call.H, call.V, splits)


def _segments(call: Forward) -> Segments | None:
    C, form = sm90.C, states_form(FORWARD.parts, call)
    programs_per_sm = 1 if sm90.parts(call.p) else call.config("forward").programs_per_sm
    each = call.V // sm90.BV * sm90.blocks(call.p)
    L = call.segment(call.unit(C) * form.plan.parts(call), each, programs_per_sm)
    return None if L is None else Segments(form, C, L)


def _forward(call: Forward) -> Plan:
    plan, C, of = Plan(), sm90.C, _segments(call)
    found = results(plan, call, call.every(C, over=C))
    begin = start(plan, call, found, of)
    first, steps = begin.state if begin.state is not None else (found.final, (0, 0, 0, 0))
    launch_forward(
        plan, call, begin.owners, begin.L or 0, found.output, found.final, found.chunk_states or "q", first, steps, SEGMENTS=of is not None,
        INITIAL=begin.state is not None, FINAL=of is None, EVERY=found.every, PIECE=0, ROWS_GIVEN=False, NARROW=False,
        EARLY=of is not None and of.form.plan.EARLY,
    )  # fmt: skip
    return plan


class BackwardSizes:
    """Sizes of the backward kernels."""

    def __init__(self, call: Call) -> None:
        self.blocks, self.parts = sm90.blocks(call.p), sm90.parts(call.p)
        self.K = call.K // self.blocks
        """Key channels of a block, and value channels of a block."""
        self.values = call.V // self.K
        """Blocks of value channels of a head."""

    @property
    def split(self) -> bool:
        """Whether a head is several blocks. Then another launch computes dv."""
        return self.blocks * self.values > 1

    def tiles(self, states: bool) -> tuple[Tile, ...]:
        """The tiles of the kernel's first tensors: q, k, v, dO and, if they have 16 bits, states and their gradients.

        With several blocks, steps of BV of V. With one, the gradients of states are in dv and, at K = 128, dq, after them.
        """
        if self.parts:
            return (Tile(sm90.C, self.K),) * 4
        W = sm90.BV if self.split else self.K
        in_rows = 0 if self.split else self.K // sm90.C
        return *[Tile(sm90.C, self.K)] * 2, *[Tile(sm90.C, W)] * 2, *(
            [Tile(self.K, W, 3)] * 2 + [Tile(sm90.C, sm90.BV)] * in_rows
        ) * states  # fmt: skip


def refuses_backward(call: Call) -> str | None:
    """Sizes of heads, layouts, calls of one chunk, and blocks of heads wider than 256 channels, whose dv are float32."""
    K = call.K // sm90.blocks(call.p)
    if call.p.sizes["T"] <= sm90.C:
        return f"it takes more than {sm90.C} tokens, these are {call.p.sizes['T']}"
    reason = (
        sm90.other_decays(call)
        or sm90.size("K of a block", K, tuple(BACKWARD_KEYS))
        or sm90.multiple("V", call.V, K)
        or sm90.far_decays(call.p)
        or sm90.not_copied(call)
    )
    if reason is None and call.p.partial and not BackwardSizes(call).split:
        return "its dv is 16 bits, that of a block of a wide head is float32"
    return reason


def avoids_backward(call: Call) -> str | None:
    """The tables select it."""
    return sm90.plain_in_table(call.config("backward"))


def launch_backward(
    plan: Plan, call: Backward, S: str, dS: str, operands: tuple[str, str, str], parameters: tuple[str, str],
    stored: tuple[str, str] | None = None,
) -> None:  # fmt: skip
    """Add the launch. ``stored``: names of the memory for the weights and for k with factors, from which another launch computes dv."""
    from ..sm90 import channel_backward, channel_backward_float32

    p, size, (dq, dk, dv), (d_gate, du), (weights, rest) = call.p, BackwardSizes(call), operands, parameters, stored or ("q", "q")
    g_b, g_t, g_h, g_k = call.gate
    warps, registers = BACKWARD_FLOAT if size.parts else BACKWARD_KEYS[size.K]
    kernel = channel_backward_float32.penstock_channel_bwd_float32_sm90 if size.parts else channel_backward.penstock_channel_bwd_sm90
    plan.launch(
        kernel, call.programs(call.chunks(sm90.C), size.blocks),
        ("q", "k", "v", "d_output", S, dS, *(() if size.parts else (dv, dq)), "g", "u", dq, dk, dv, d_gate, du, weights, rest,
         "cu_seqlens"),
        (p.scale, sequences, tokens, g_b, g_h, *call.bonus), warps, size.tiles(call.stored(sm90.C).itemsize == 2), registers,
        g_t=g_t, g_k=g_k, H=call.H * size.blocks, K=size.K, DG=call.dg, STATIC=call.static, PREVIOUS=call.previous, PACKED=call.packed,
        BLOCKS=size.blocks, NV=size.values, STORED=stored is not None, PARTS=size.parts,
    )  # fmt: skip


def segments_of_gradients(call: Backward) -> Segments | None:
    """The segments for the gradients of states before chunks."""
    return segments_before_chunks(call, states_form(states.BESIDE_HOPPER, call), sm90.C)


def _backward(call: Backward) -> Plan:
    """One block: a program computes all gradients. Gradients of states are in rows of dv and dq, if they have 16 bits."""
    plan, C, form = Plan(), sm90.C, states_form(BACKWARD.parts, call)
    found = gradients(plan, call, form, C)
    dq, dk, dv = gradients_of_operands(plan, call)
    stored = call.stored(C)
    in_rows = (dv, dq)[: call.K // C] if stored.itemsize == 2 else ()
    dS = before_chunks(plan, call, form, found.terms, C, stored, in_rows)
    launch_backward(plan, call, found.S, dS, (dq, dk, dv), gradients_of_parameters(plan, call, C))
    return plan


def _backward_split(call: Backward) -> Plan:
    """Several blocks: dv is a launch of its own."""
    plan, C, size, form = Plan(), sm90.C, BackwardSizes(call), states_form(BACKWARD.parts, call)
    found = gradients(plan, call, form, C)
    operands = gradients_of_operands(plan, call)
    dS = before_chunks(plan, call, form, found.terms, C, call.stored(C))
    parameters = gradients_of_parameters(plan, call, C)
    slots = call.chunks(C)
    weights = plan.empty("weights", slots, call.H, size.blocks, C, C)
    rest = plan.empty("rest", batch, tokens, call.H, call.K, dtype=call.p.k.dtype)
    launch_backward(plan, call, found.S, dS, operands, parameters, (weights, rest))
    BV = 64 if size.parts or call.V % 128 else 128  # float32 at 128: 0.24 ms, with 128 channels a program 0.38
    plan.launch(
        values.penstock_chunk_dv, call.programs(slots, call.V // BV), (weights, rest, "d_output", dS, operands[2], "cu_seqlens"),
        (sequences, tokens, call.H, *call.upstream.stride()), 4, K=call.K, V=call.V, BK=64, BV=BV, C=C, PACKED=call.packed,
        PRECISION=call.precision if size.parts else "own", BLOCKS=size.blocks,
    )  # fmt: skip
    return plan


def _of_16_bits(call: Call) -> str | None:
    return "it takes 16 bits, these are float32" if sm90.parts(call.p) else refuses_backward(call)


def _refuses_split(call: Call) -> str | None:
    return _of_16_bits(call) or ("it takes heads of one block, K = V" if BackwardSizes(call).split else None)


def _refuses_key_blocks(call: Call) -> str | None:
    return _of_16_bits(call) or ("it takes one block of key channels" if sm90.blocks(call.p) > 1 else None)


def _refuses_16_bits(call: Call) -> str | None:
    return refuses_backward(call) if sm90.parts(call.p) else "it takes float32, these are 16 bits"


SIZES = {"B": 1, "N": 1, "T": 130, "H": 2, "G": 2}
EXAMPLES = tuple(Example(variant, torch.bfloat16, SIZES | {"K": K, "V": K}) for variant in ("gla", "rwkv6") for K in (64, 128))
HALF = Example("rwkv6", torch.float16, SIZES | {"K": 64, "V": 64})
SPLIT = tuple(Example("gla", dtype, SIZES | {"K": 64, "V": 128}) for dtype in (torch.bfloat16, torch.float16))
FLOAT = tuple(Example("rwkv6", torch.float32, SIZES | {"K": K, "V": 64}) for K in (64, 128))
FORWARD = ForwardForm(
    "channel_fwd_sm90", _forward, absent, refuses_forward, avoids_forward, states.BESIDE_HOPPER, (*EXAMPLES, HALF, *FLOAT),
    segments=_segments,
)  # fmt: skip
BACKWARD = BackwardForm(
    "channel_bwd_sm90", _backward, absent, _refuses_split, avoids_backward, states.BESIDE_HOPPER, (*EXAMPLES, HALF), chunk=sm90.chunk,
    segments=segments_of_gradients,
)  # fmt: skip
BACKWARD_SPLIT = BackwardForm(
    "channel_bwd_split_sm90", _backward_split, absent, _refuses_key_blocks, avoids_backward, states.BESIDE_HOPPER, SPLIT,
    chunk=sm90.chunk, segments=segments_of_gradients,
)  # fmt: skip
BACKWARD_FLOAT32 = BackwardForm(
    "channel_bwd_float32_sm90", lambda call: (_backward_split if BackwardSizes(call).split else _backward)(call), absent, _refuses_16_bits,
    avoids_backward, states.BESIDE_HOPPER, FLOAT, chunk=sm90.chunk, segments=segments_of_gradients,
)  # fmt: skip
