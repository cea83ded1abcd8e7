"""The launches of a call of the recurrence.

Kernels, constants and whether sequences are split into segments depend on ``Problem.counts``. Grids, numbers and shapes are functions of
the exact sizes, so calls with equal counts share a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu.plan import Plan, Size, Sizes, chunks, contiguous, strides
from ...gpu.target import Target, power, precision
from ..declaration import Recurrence, Tokens
from ..levels import lengths
from . import blocks, chunk_backward, chunk_forward, groups, hopper, recurrent, tiles, values, walk
from .levels import levels
from .states import Sum, before_chunks, before_segments
from .table import DECAYS, LEAST, READS, KernelConfig, Key, config, from_registers

LIMITS = {"bf16": 200.0, "tf32": 200.0, "tf32x3": 32.0, "ieee": 32.0}
"""The strongest scalar decay of a chunk, log2 units, whose decays between tokens are differences of sums. If products have float32
accuracy, these need it too (half an ulp of 32 is 2e-6)."""

NONE, SCALAR, CHANNEL = (kind.value for kind in (tiles.NONE, tiles.SCALAR, tiles.CHANNEL))
FEW = 16
"""Up to this many tokens the rounding error of a float32 state that decays at each token, 2^-24 each, stays below its budget."""
WALKS = 64
"""Sequences times heads from which on walks are faster at 128 key channels (measured on an H200). At 64, as many as multiprocessors."""
SPAN = 16
"""Tokens between the states that the token-serial backward pass stores; states between them are recomputed. Each state has two more rows,
for pending decays."""


class Call(NamedTuple):
    """The sizes and choices that all launches of a problem share."""

    B: int
    """B, T and N are rounded up to powers of two; only choices depend on them."""
    T: int
    N: int
    H: int
    K: int
    V: int
    gate: tuple[int, ...]
    """Strides of the decay, expanded to [B,T,H,K]."""
    decay: int
    static: bool
    previous: bool
    packed: bool
    precision: str
    half: bool
    """Whether states are sums of products in float16: for decays per channel in float16 on Hopper."""
    target: Target

    @classmethod
    def of(cls, p: Tokens, target: Target) -> Call:
        """The sizes and choices of a problem."""
        axes, sizes = p.variant.decay, p.sizes
        decay = NONE if not axes else CHANNEL if "K" in axes else SCALAR
        gate: tuple[int, ...] = (0, 0, 0, 0)
        if p.gate is not None:  # torch keeps strides of axes of size 1: empty sequences behind a single token would load beyond g
            gate = tuple([step if axis in axes else 0 for axis, step in zip("BTHK", p.gate.expand(p.q.shape).stride())])
        static, packed = bool(axes) and "T" not in axes, p.cu_seqlens is not None
        products = precision(p.q.dtype, target)
        half = p.q.dtype == torch.float16 and decay == CHANNEL and target.arch == "sm_90"
        return cls(
            **p.counts, H=sizes["H"], K=sizes["K"], V=sizes["V"], gate=gate, decay=decay, static=static,
            previous=p.variant.read == "previous", packed=packed, precision=products, half=half, target=target,
        )  # fmt: skip

    @property
    def pending(self) -> bool:
        """Whether the token-serial kernels keep decays pending. Always for packed sequences: the host does not know their lengths."""
        return self.decay != NONE and (self.packed or self.T > FEW)

    @property
    def parts(self) -> tuple[int, ...]:
        """PART of each launch of a chunk kernel. With decays per channel the second launch has the code for strong decays."""
        return (1, 2) if self.decay == CHANNEL else (0,)

    @property
    def cuda(self) -> bool:
        """Whether kernels are compiled for a GPU of NVIDIA."""
        return self.target.arch.startswith("sm_")

    @property
    def flags(self) -> dict[str, Any]:
        """The constants of every chunk kernel."""
        sizes, limit = {"K": self.K, "V": self.V}, LIMITS[self.precision]
        return {**sizes, "DECAY": self.decay, "STATIC": self.static, "PACKED": self.packed, "PRECISION": self.precision, "LIMIT": limit}

    def backward_chunk(self, p: Recurrence, *d_output: Tensor) -> tuple[int, Any]:
        """Tokens of a chunk of the backward pass, and the Hopper kernel for decays per channel that computes it, or None."""
        shared = groups.of(p, self)
        if shared:
            return groups.C, None
        b = self.config("backward")
        kernel = hopper.backward(p, b, self.target, *d_output)
        return hopper.C if kernel or self.scalar(p, *d_output) else b.C, kernel

    def scalar(self, p: Recurrence, *d_output: Tensor) -> hopper.Scalar | None:
        """The Hopper kernels that walk over whole sequences of a head, where there are enough programs for them to be faster, or None."""
        least = min(self.target.multiprocessors, WALKS if self.K == 128 else self.target.multiprocessors)
        return hopper.scalar(p, self.target, *d_output) if least <= self.N * self.H else None

    def levels(self, plan: Plan, C: int) -> str:
        """The matrices of sums of decays per channel, for chunks of C tokens."""
        return plan.constant("levels", levels, C, self.previous) if self.decay == CHANNEL else "q"

    def key(self, kernel: str) -> Key:
        """The key of a kernel's block sizes in the tables."""
        products = "bf16" if self.half and kernel == "states" else self.precision  # both have operands of 16 bits
        return Key(kernel, DECAYS[self.decay], READS[self.previous], products, power(self.K), power(self.V))

    def config(self, kernel: str) -> KernelConfig:
        """Block sizes of a launch, no larger than the head."""
        key = self.key(kernel)
        b = config(key, self.target)
        if kernel == "forward" and self.K % 16 and from_registers(self.target) and key not in self.target.table:
            b = b._replace(C=min(b.C, 16))  # addresses of such heads take registers: gla at 100 spilled 400 bytes on sm_80, 460 on gfx942
        least = 16 if kernel in ("states", "recurrent", "step") else LEAST
        return b._replace(BK=min(power(self.K, least), b.BK), BV=min(power(self.V, least), b.BV))

    def stored(self, C: int) -> torch.dtype:
        """The dtype of stored states before chunks of C tokens. Products round them to bfloat16, but a caller's own state stays float32."""
        return torch.bfloat16 if self.precision == "bf16" and self.T > C else torch.float32

    def step_config(self) -> KernelConfig:
        """The configuration of an update in place. BV is halved, down to 16, until each multiprocessor has ``programs_per_sm`` programs."""
        b = self.config("step")
        while b.BV > 16 and self.N * self.H * math.ceil(self.V / b.BV) < b.programs_per_sm * self.target.multiprocessors:
            b = b._replace(BV=b.BV // 2, warps=max(b.warps // 2, 1))
        return b

    def chunks(self, L: Size) -> Callable[[Sizes], int]:
        """An upper bound of the number of chunks (or segments) of L tokens in all sequences."""
        return lambda s: chunks(s["T"], L(s) if callable(L) else L, s["N"], self.packed)

    def programs(self, count: Size, each: int) -> Callable[[Sizes], int]:
        """A grid: ``each`` programs for every head of each of ``count`` sequences, segments or chunks."""
        return lambda s: (count(s) if callable(count) else count) * self.H * each

    def segment(self, C: int, each: int, programs_per_sm: int, least: int = 2) -> Callable[[Sizes], int] | None:
        """Tokens in a segment, a multiple of C, for ``programs_per_sm`` programs on each multiprocessor; None: no segments.

        ``each``: the number of programs for a head of a sequence. ``least``: fewer segments of a sequence are not worth their launches.
        """
        target = programs_per_sm * self.target.multiprocessors
        if least * self.N * self.H * each > target:
            return None

        def tokens(s: Sizes) -> int:
            programs = max(s["N"] * self.H * each, 1)
            total = s["T"] * s["B"] if self.packed else s["T"]
            wanted = math.ceil(target * s["N"] / programs) if self.packed else target // programs
            segments = min(wanted, max(total // (4 * C), 1))
            return max(math.ceil(total / segments / C), 1) * C

        return tokens if tokens({"B": self.B, "T": self.T, "N": self.N}) < self.T else None

    def walked_segment(self) -> Callable[[Sizes], int] | None:
        """Tokens in a segment of ``hopper_walk``. Predicted, not measured: shorter walks cost less than the states of segments."""
        each = self.V // hopper.BV
        return self.segment(hopper.C, each, 1) if self.T >= 4096 and 4 * self.N * self.H * each <= self.target.multiprocessors else None

    def walked_values(self, L: Size | None) -> int:
        """Value channels of a program of ``hopper_walk``: 64 if its programs are few."""
        programs = self.N * self.H * (self.V // 64)
        return 64 if L is not None or self.V % 128 or programs <= self.target.multiprocessors else 128


def _given(name: str, x: Tensor | None, instead: str) -> str:
    return name if x is not None else instead


def bonus(p: Tokens) -> tuple[int, ...]:
    """The strides of u."""
    return p.u.stride() if p.u is not None else (0, 0)


def _T(s: Sizes) -> int:
    return s["T"]


def _N(s: Sizes) -> int:
    return s["N"]


def chunk_forward_plan(p: Recurrence, target: Target, keep: bool = False) -> Plan:
    """``output`` and ``final_state`` by chunks; if ``keep``, also ``chunk_states`` for the backward pass if its chunks are multiples."""
    plan, c = Plan(), Call.of(p, target)
    b = c.config("forward")
    BK, grid = power(c.K, LEAST), math.ceil(c.V / b.BV)
    shape = (lambda s: s["B"], _T, c.H, c.V)
    output = plan.empty("output", *shape, dtype=p.summand(p.v))
    final = plan.empty("final_state", _N, c.H, c.K, c.V)
    walked = hopper.walk(p, b, target)
    kernel = None if walked else hopper.forward(p, b, target)
    apart, _ = c.backward_chunk(p)
    scalar = c.scalar(p)
    on_hopper = walked is not None or kernel is not None or scalar is not None
    C = hopper.C if on_hopper else b.C
    meets = apart % C == 0
    L, on = None, hopper.states(p, b, target) if kernel else None
    if not scalar:
        each, least = (grid * kernel.blocks, kernel.programs_per_sm) if kernel else (grid, b.programs_per_sm)
        unit = (apart if meets else C) * (on.parts if on else 1)
        L = c.walked_segment() if walked else c.segment(unit, each, least)  # ``keep`` changes no result
    dense = chunks(c.T, apart, c.N, c.packed) * apart <= 2 * c.B * c.T  # many short sequences have more slots than tokens
    rounded = not on_hopper or c.T > C  # the Hopper kernels store bfloat16, which is too inaccurate for a caller's own states
    every = apart if keep and meets and dense and rounded else 0
    chunk_states = plan.empty("chunk_states", c.chunks(every), c.H, c.K, c.V, dtype=c.stored(every)) if every else "q"
    state = None if p.initial_state is None else ("initial_state", p.initial_state.stride())
    count: Size = _N
    if L is not None:
        of = Sum("k", "v", strides(p.k, p.v), 1.0, p.reverse, state, final, False, on)
        state, count = before_segments(plan, c, of, C, L), c.chunks(L)
    if walked:
        walk.weights(plan, c, p, walked, False)
        walk.over_chunks(
            plan, c, p, walked, "v", output, state, None if L is not None else final, L, chunk_states if every else None, every, False
        )
        return plan
    first, steps = state if state is not None else (final, (0, 0, 0, 0))
    if scalar:
        plan.launch(
            scalar.forward, c.programs(_N, 1),
            ("q", "k", "v", output, chunk_states if every else output, "g", first, output, final, "cu_seqlens"),
            (p.scale, _N, _T, c.H, *scalar.shared, *c.gate[:3], *steps), scalar.warps, scalar.tiles, scalar.registers,
            K=c.K, DECAYS=c.decay != NONE, INITIAL=state is not None, KEEP=every > 0, PACKED=c.packed,
        )  # fmt: skip
        return plan
    flags: dict[str, Any] = {"SEGMENTS": L is not None, "INITIAL": state is not None, "FINAL": L is None, "EVERY": every}
    if kernel:
        flags |= {"PIECE": 0, "ROWS_GIVEN": False, "NARROW": False, "EARLY": L is not None and on is not None}
        hopper_forward(plan, c, p, kernel, count, L or 0, output, final, chunk_states, first, steps, **flags)
        return plan
    programs, numbers = c.programs(count, grid), (p.scale, _N, _T, L or 0, c.H)
    resume = plan.empty("resume", programs, dtype=torch.int32) if c.decay == CHANNEL else "q"
    for part in c.parts:
        plan.launch(
            chunk_forward.penstock_chunk_fwd, programs,
            ("q", "k", "v", "g", "u", c.levels(plan, C), first, output, final, chunk_states, resume, "cu_seqlens", "q"),
            (*numbers, *strides(p.q, p.k, p.v), *c.gate, *bonus(p), *steps), b.warps, **c.flags, BK=BK, BV=b.BV,
            C=C, LEVELS=len(lengths(C)), PREVIOUS=c.previous, REVERSE=p.reverse, **flags, STAGES=b.stages,
            PART=part, PIECE=0, SLOTS=False,
        )  # fmt: skip
    return plan


def hopper_forward(
    plan: Plan, c: Call, p: Tokens, kernel: hopper.Forward, count: Size, L: Size, output: str, final: str, chunk_states: str,
    first: str, steps: tuple[int, ...], slots: str = "q", fused: bool = True, **flags: Any,
) -> None:  # fmt: skip
    """Add the launch of the Hopper kernel for ``count`` sequences or segments and, of heads in blocks, the sum of their outputs."""
    stored = in_tiles = output
    if kernel.blocks > 1:
        stored, in_tiles = plan.empty("outputs", lambda s: s["B"], _T, c.H * kernel.blocks, c.V), "v"
    decays = "g" if kernel.constants["TILED"] else "q"
    plan.launch(
        kernel.kernel, c.programs(count, kernel.blocks * (c.V // hopper.BV)),
        ("q", "k", "v", in_tiles, decays, "g", "u", first, stored, final, chunk_states, "cu_seqlens", slots),
        (p.scale, _N, _T, L, c.H * kernel.blocks, *c.gate, *bonus(p), *steps), 4, kernel.tiles, kernel.registers, fused, flags["EARLY"],
        PREVIOUS=c.previous, PACKED=c.packed, **flags, **kernel.constants,
    )  # fmt: skip
    if kernel.blocks > 1:
        blocks.add(plan, stored, output, c.H, c.V, kernel.blocks)


def chunk_backward_plan(
    p: Recurrence, d_output: Tensor, d_final_state: Tensor | None, target: Target, states: Tensor | None = None, dg: bool = True
) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg``, ``du`` and ``d_initial_state`` by chunks. ``du`` and a constant decay's ``dg`` are partial sums.

    ``dq`` and ``dk`` are those of every head or, of heads that share q and k, of (parts of) groups.

    ``states`` are the forward pass's ``chunk_states``; they are recomputed if None, or if they are those before other chunks: strides and
    the precision of products may have changed since. ``dg``: whether to compute dg.
    """
    plan, c = Plan(), Call.of(p, target)
    b = c.config("backward")
    C, kernel = c.backward_chunk(p, d_output)
    stored, on = c.stored(C), hopper.states(p, b, target, d_output) if kernel else None
    state, tokens = (_N, c.H, c.K, c.V), (lambda s: s["B"], _T, c.H)
    d_initial = None if p.initial_state is None else plan.empty("d_initial_state", *state, dtype=p.initial_state.dtype)
    start = None if p.initial_state is None else ("initial_state", p.initial_state.stride())
    if states is not None and states.shape[0] == c.chunks(C)(p.sizes):
        S = "states"
    else:
        S = before_chunks(plan, c, Sum("k", "v", strides(p.k, p.v), 1.0, p.reverse, start, None, False, on), C, stored)
    d_start = None if d_final_state is None else ("d_final_state", d_final_state.stride())
    of = Sum("q", "d_output", strides(p.q, d_output), p.scale, p.reverse, d_start, d_initial, True, on)
    slots = c.chunks(C)
    shared = groups.of(p, c)
    dq, dk = ("dq", "dk") if shared else (plan.empty("d" + name, *tokens, c.K, dtype=p.q.dtype) for name in ("q", "k"))
    dv = plan.empty("dv", *tokens, c.V, dtype=p.summand(p.v))
    walked = hopper.walk(p, b, target, d_output) if kernel else None
    back = None if shared else c.scalar(p, d_output)
    dS = "q"
    if walked:
        dS = plan.empty("d_chunk_states", slots, c.H, c.K, c.V, dtype=stored)
        L = c.walked_segment()
        last = d_initial
        if L is not None:
            d_start, last = before_segments(plan, c, of, C, L), None
        walk.weights(plan, c, p, walked, True)
        walk.over_chunks(plan, c, p, walked, "d_output", dv, d_start, last, L, dS, C, True)
    elif not back:
        in_rows = (dv, dq)[: c.K // C] if kernel and not kernel.apart and stored.itemsize == 2 else ()
        dS = before_chunks(plan, c, of, C, stored, in_rows)
    d_gate = du = "q"
    if p.g is not None and dg:
        axes: dict[str, Size] = {"B": tokens[0], "T": _T, "H": c.H, "K": c.K}
        shape = [axes[axis] for axis in p.variant.decay]
        d_gate = plan.empty("dg", slots, *shape) if c.static else plan.empty("dg", *shape, dtype=p.summand(p.g))
    if p.u is not None:
        du = plan.empty("du", slots, c.H, c.K)
    if shared:
        groups.launch(plan, c, p, shared, S, dS, d_output, d_gate)
        return plan
    if kernel:
        (g_b, g_t, g_h, g_k), (warps, registers) = c.gate, kernel.launch
        weights = rest = "q"
        if kernel.apart and not walked:
            weights, rest = plan.empty("weights", slots, c.H, kernel.blocks, C, C), plan.empty("rest", *tokens, c.K, dtype=p.k.dtype)
        plan.launch(
            kernel.kernel, c.programs(slots, kernel.blocks),
            ("q", "k", "v", "d_output", S, dS, *(() if kernel.parts else (dv, dq)), "g", "u", dq, dk, dv, d_gate, du, weights, rest,
             "cu_seqlens"),
            (p.scale, _N, _T, g_b, g_h, *bonus(p)), warps, hopper.backward_tiles(kernel, stored.itemsize == 2), registers,
            g_t=g_t, g_k=g_k, H=c.H * kernel.blocks, K=kernel.K, DG=dg, STATIC=c.static, PREVIOUS=c.previous, PACKED=c.packed,
            BLOCKS=kernel.blocks, NV=kernel.values, STORED=kernel.apart and not walked, PARTS=kernel.parts,
        )  # fmt: skip
        if kernel.apart and not walked:
            BV = 64 if kernel.parts or c.V % 128 else 128  # float32 at 128: 0.24 ms, with 128 channels a program 0.38
            plan.launch(
                values.penstock_chunk_dv, c.programs(slots, c.V // BV), (weights, rest, "d_output", dS, dv, "cu_seqlens"),
                (_N, _T, c.H, *d_output.stride()), 4, K=c.K, V=c.V, BK=64, BV=BV, C=C, PACKED=c.packed,
                PRECISION=c.precision if kernel.parts else "own", BLOCKS=kernel.blocks,
            )  # fmt: skip
        return plan
    if back:
        final, ends = d_start if d_start is not None else ("q", (0, 0, 0, 0))
        plan.launch(
            back.backward, c.programs(_N, 1),
            ("q", "k", "v", "d_output", S, dq, dk, dv, "g", final, dq, dk, dv, d_gate, d_initial or "q", "cu_seqlens"),
            (p.scale, _N, _T, c.H, *back.shared, *c.gate[:3], *ends), back.warps, (*back.tiles, *back.tiles[:3]), back.registers,
            DECAYS=c.decay != NONE, STATIC=c.static, DG=d_gate != "q", LAST=d_start is not None, FIRST=d_initial is not None,
            PACKED=c.packed,
        )  # fmt: skip
        return plan
    strong = plan.empty("strong", c.programs(slots, 1), dtype=torch.int32) if c.decay == CHANNEL else "q"
    for part in c.parts:
        plan.launch(
            chunk_backward.penstock_chunk_bwd, c.programs(slots, 1),
            ("q", "k", "v", "g", "u", c.levels(plan, C), "d_output", S, dS, dq, dk, dv, d_gate, du, strong, "cu_seqlens"),
            (p.scale, _N, _T, c.H, *strides(p.q, p.k, p.v), *c.gate, *bonus(p), *d_output.stride()), b.warps, **c.flags,
            BK=b.BK, BV=b.BV, C=C, LEVELS=len(lengths(C)), DG=p.g is not None and dg, PREVIOUS=c.previous, REVERSE=p.reverse, PART=part,
        )  # fmt: skip
    return plan


def recurrent_forward_plan(p: Recurrence, target: Target) -> Plan:
    """``output`` and ``final_state`` token by token."""
    plan, c = Plan(), Call.of(p, target)
    b, own = c.config("recurrent"), contiguous((0, c.H, c.K, c.V))
    output = plan.empty("output", lambda s: s["B"], _T, c.H, c.V, dtype=p.summand(p.v))
    final = plan.empty("final_state", _N, c.H, c.K, c.V)
    first = p.initial_state.stride() if p.initial_state is not None else own
    plan.launch(
        recurrent.penstock_recurrent_fwd, c.programs(_N, math.ceil(c.V / b.BV)),
        ("q", "k", "v", "g", "u", _given("initial_state", p.initial_state, final), output, final, "cu_seqlens", "q"),
        (p.scale, _T, c.H, *strides(p.q, p.k, p.v), *c.gate, *bonus(p), *first, *own),
        b.warps, K=c.K, V=c.V, BK=power(c.K), BV=b.BV, DECAY=c.decay, PREVIOUS=c.previous, INITIAL=p.initial_state is not None,
        PACKED=c.packed, REVERSE=p.reverse, SLOTS=False, PENDING=c.pending, PIECE=0, ONE=False, CUDA=c.cuda, EARLY=False,
    )  # fmt: skip
    return plan


def recurrent_backward_plan(p: Recurrence, d_output: Tensor, d_final_state: Tensor | None, target: Target) -> Plan:
    """All gradients token by token. All but dv are float32 partial sums of blocks of V, which the caller adds."""
    plan, c = Plan(), Call.of(p, target)
    b = c.config("recurrent")
    BK, NV = power(c.K), math.ceil(c.V / b.BV)
    tokens: tuple[Size, ...] = (lambda s: s["B"], _T, c.H)

    def scratch(s: Sizes) -> int:
        kept = s["N"] * (SPAN + 1) + s["T"] // SPAN if c.packed else s["N"] * (SPAN + math.ceil(s["T"] / SPAN))
        return kept * c.H * NV * BK * (b.BV + 2)

    kept = plan.empty("kept", scratch)
    dq, dk = plan.empty("dq", NV, *tokens, c.K), plan.empty("dk", NV, *tokens, c.K)
    dv = plan.empty("dv", *tokens, c.V, dtype=p.summand(p.v))
    dg = du = "q"
    if p.g is not None:
        axes: dict[str, Size] = {"B": tokens[0], "T": _T, "H": c.H, "K": c.K}
        dg = plan.empty("dg", NV, *(_N,)[: c.static], *[axes[axis] for axis in p.variant.decay])
    if p.u is not None:
        du = plan.empty("du", NV, _N, c.H, c.K)
    d_initial = plan.empty("d_initial_state", _N, c.H, c.K, c.V)
    own = contiguous((0, c.H, c.K, c.V))
    first, last = (x.stride() if x is not None else own for x in (p.initial_state, d_final_state))
    plan.launch(
        recurrent.penstock_recurrent_bwd, c.programs(_N, NV),
        ("q", "k", "v", "g", "u", _given("initial_state", p.initial_state, d_initial), "d_output",
         _given("d_final_state", d_final_state, d_initial), dq, dk, dv, dg, du, d_initial, kept, "cu_seqlens"),
        (p.scale, _N, _T, c.H, lambda s: s["B"] * s["T"], *strides(p.q, p.k, p.v), *c.gate, *bonus(p), *first, *d_output.stride(), *last),
        b.warps, K=c.K, V=c.V, BK=BK, BV=b.BV, DECAY=c.decay, STATIC=c.static, PREVIOUS=c.previous, INITIAL=p.initial_state is not None,
        D_FINAL=d_final_state is not None, PACKED=c.packed, REVERSE=p.reverse, SPAN=SPAN,
        PENDING=c.pending,
    )  # fmt: skip
    return plan
