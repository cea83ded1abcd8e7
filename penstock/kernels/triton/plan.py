"""What a call launches: kernels, grids, block sizes and memory, from sizes and strides alone.

A ``Plan`` holds no tensor and touches no device. ``launch`` runs it, ``penstock check --compile`` compiles it for GPUs that are not
there, ``penstock tune`` times it with other block sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem import Problem
from ..contract import contiguous
from . import chunk_backward, chunk_forward, hopper, recurrent, segments, tiles
from .table import DECAYS, LEAST, READS, Blocks, Key, Target, blocks, power

LIMITS = {"bf16": 200.0, "tf32": 200.0, "tf32x3": 32.0, "ieee": 32.0}
"""How far the decays of tokens that share an anchor may fall, log2 units, where a chunk has several (or a scalar decay): factors must
not overflow in float32, and where products are as exact as float32 the sums of decays should be too (half an ulp of 32 is 2e-6)."""

NONE, SCALAR, CHANNEL = (kind.value for kind in (tiles.NONE, tiles.SCALAR, tiles.CHANNEL))
FEW = 16
"""Tokens over which the rounding of a float32 state that decays token by token, 2^-24 each, stays below its budget."""
SPAN = 16
"""Tokens between the states that the token-serial backward pass keeps; those within are computed again. A state has two rows beside it,
for pending decays."""


class Launch(NamedTuple):
    """One kernel: its tensors by name, then numbers, then compile-time constants, in the order of its parameters."""

    kernel: Any
    grid: int
    tensors: tuple[str, ...]
    numbers: tuple[int | float, ...]
    constants: tuple[Any, ...]
    options: tuple[tuple[str, int], ...]
    """For Triton's compiler: warps, and registers for each thread at first where the kernel divides them anew."""
    tiles: tuple[hopper.Tile, ...] = ()
    """Of the first tensors, if those are copied in tiles by the hardware."""

    def descriptions(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Of the tensors that are copied in tiles."""
        return [hopper.description(tensors[name], tile) for name, tile in zip(self.tensors, self.tiles)]

    def arguments(self, tensors: Mapping[str, Tensor], known: Sequence[Mapping[str, Any]], others: Mapping[str, Any]) -> list[Any]:
        """Its tensors as the kernel takes them: the first by their descriptions, the rest looked up in ``others``."""
        tiled = [hopper.described(tensors[name], one) for name, one in zip(self.tensors, known)]
        return tiled + [others[name] for name in self.tensors[len(tiled) :]]


@dataclass
class Plan:
    """Memory to make, by name, and kernels to launch one after another."""

    memory: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    C: int = 0
    """Tokens in a chunk; the tensor ``ones`` [C + 1, C], row n with n ones, is at hand for the launches."""

    def empty(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> str:
        """Plan uninitialised memory."""
        self.memory[name] = (shape, dtype)
        return name

    def launch(
        self, kernel: Any, grid: int, tensors: tuple[str, ...], numbers: tuple[int | float, ...], warps: int,
        tiles: tuple[hopper.Tile, ...] = (), registers: int = 0, **constants: Any,
    ) -> None:  # fmt: skip
        """Plan a launch; ``constants`` in any order."""
        names = kernel.arg_names[len(tensors) + len(numbers) :]
        options = (("num_warps", warps), *((("maxnreg", registers),) if registers else ()))
        self.launches.append(Launch(kernel, grid, tensors, numbers, tuple(constants[name] for name in names), options, tiles))


def precision(dtype: torch.dtype, target: Target) -> str:
    """How products take their operands.

    float16 cannot hold the factors of a chunk; TF32 can, and has as many bits. float32 follows
    ``torch.get_float32_matmul_precision()``: three TF32 products, as exact as float32, or one where it allows that.
    """
    if target.interpreted or not target.arch.startswith("sm_"):
        return "bf16" if dtype == torch.bfloat16 and not target.interpreted else "ieee"
    if dtype == torch.bfloat16:
        return "bf16"
    return "tf32" if dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest" else "tf32x3"


class Call(NamedTuple):
    """What all launches of one problem share."""

    B: int
    T: int
    H: int
    K: int
    V: int
    N: int
    gate: tuple[int, ...]
    """Strides of the decay, seen as [B,T,H,K]."""
    decay: int
    static: bool
    previous: bool
    packed: bool
    precision: str
    target: Target

    @classmethod
    def of(cls, p: Problem, target: Target) -> Call:
        """Sizes and kinds of a problem."""
        axes = p.variant.decay
        decay = NONE if not axes else CHANNEL if "K" in axes else SCALAR
        gate = p.gate.expand(p.q.shape).stride() if p.gate is not None else (0, 0, 0, 0)
        static, packed = bool(axes) and "T" not in axes, p.cu_seqlens is not None
        previous, products = p.variant.read == "previous", precision(p.q.dtype, target)
        return cls(**p.sizes, gate=gate, decay=decay, static=static, previous=previous, packed=packed, precision=products, target=target)

    @property
    def pending(self) -> bool:
        """Whether the token-serial kernels keep decays pending: of packed sequences always, as nobody knows how long each of them is."""
        return self.decay != NONE and (self.packed or self.T > FEW)

    @property
    def flags(self) -> dict[str, Any]:
        """The constants that every chunk kernel takes."""
        sizes, limit = {"K": self.K, "V": self.V}, LIMITS[self.precision]
        return {**sizes, "DECAY": self.decay, "STATIC": self.static, "PACKED": self.packed, "PRECISION": self.precision, "LIMIT": limit}

    def backward_chunk(self, p: Problem, *d_output: Tensor) -> tuple[int, Any]:
        """Tokens between the states that the backward pass by chunks goes from, and the kernel for Hopper if that does it, or None."""
        b = self.blocks("backward")
        kernel = hopper.backward(p, b, self.target, self.precision, *d_output)
        return hopper.C if kernel else b.C, kernel

    def launches(self, C: int) -> tuple[tuple[int, bool, bool], ...]:
        """Tokens of a chunk, HALVES and EXACT of the launches of a chunk kernel: each does what did not suit the one before it.

        Chunks of less than 64 tokens are not worth halves: 16 tokens seldom suit where 32 do not, and an idle launch costs 3 us.
        """
        if self.decay != CHANNEL:
            return ((C, False, False),)
        return ((C, False, False), (C // 2, True, False), (C // 2, True, True)) if C >= 64 else ((C, False, False), (C, False, True))

    def key(self, kernel: str) -> Key:
        """Where its block sizes are looked up."""
        return Key(kernel, DECAYS[self.decay], READS[self.previous], self.precision, power(self.K), power(self.V))

    def blocks(self, kernel: str) -> Blocks:
        """Block sizes of a launch, no larger than the head."""
        b = blocks(self.key(kernel), self.target)
        least = 16 if kernel in ("states", "recurrent", "step") else LEAST
        return b._replace(BK=min(power(self.K, least), b.BK), BV=min(power(self.V, least), b.BV))

    def stored(self, C: int) -> torch.dtype:
        """What states before C tokens are stored as: operands of products are rounded anyway, but not a caller's states."""
        return torch.bfloat16 if self.precision == "bf16" and self.T > C else torch.float32

    def step_blocks(self) -> Blocks:
        """Those of a decode step: rows are halved, down to 16, until ``fill`` programs a multiprocessor run; a thread's share stays."""
        b = self.blocks("step")
        while b.BV > 16 and self.N * self.H * math.ceil(self.V / b.BV) < b.fill * self.target.multiprocessors:
            b = b._replace(BV=b.BV // 2, warps=max(b.warps // 2, 1))
        return b

    def slots(self, L: int) -> int:
        """Stretches of L tokens that the sequences may need together."""
        return slots(self.T, L, self.N, self.packed)

    def segment(self, C: int, programs: int, fill: int) -> int:
        """Tokens in a segment, a multiple of C, such that ``fill`` programs a multiprocessor run where one a sequence made ``programs``."""
        chunks, target = max(math.ceil(self.T / C), 1), fill * self.target.multiprocessors
        if 2 * programs > target:
            return chunks * C
        tokens = self.T * self.B if self.packed else self.T
        segments = min(target // programs if not self.packed else math.ceil(target * self.N / programs), max(tokens // (4 * C), 1))
        return math.ceil(tokens / segments / C) * C


def slots(T: int, L: int, N: int, packed: bool) -> int:
    """Stretches of L tokens that N sequences of T tokens, or of T together if packed, may need: see ``tiles.span_of``."""
    return T // L + N if packed else N * math.ceil(T / L)


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of all axes of all tensors, in a kernel's order."""
    return tuple(stride for x in tensors for stride in x.stride())


def _given(name: str, x: Tensor | None, instead: str) -> str:
    return name if x is not None else instead


def _states(
    plan: Plan, c: Call, names: tuple[str, str], steps_of: tuple[int, ...], L: int, C: int, scale: float, reverse: bool,
    start: tuple[str, tuple[int, ...]] | None, end: str | None, adjoint: bool, stored: torch.dtype | None,
) -> str:  # fmt: skip
    """The states before chunks, as ``stored``; None: before segments. Sequences begin with ``start``, if given; ``end`` is written."""
    x, y = names
    d, b = "d_" * adjoint, c.blocks("states")
    slots, grid = c.slots(L), math.ceil(c.K / b.BK) * math.ceil(c.V / b.BV)
    chunk_states = plan.empty(d + "chunk_states", c.slots(C), c.H, c.K, c.V, dtype=stored) if stored is not None else x

    def walk(first: tuple[str, tuple[int, ...]] | None, last: str | None, decays: str, of_segments: bool, chunks: bool) -> None:
        name, steps = first if first is not None else (x, (0, 0, 0, 0))
        plan.launch(
            segments.states, slots * c.H * grid,
            (x, y, "g", name, chunk_states, last if last is not None else x, decays, "cu_seqlens"),
            (scale, c.N, c.T, c.H, *steps_of, *c.gate, *steps), b.warps, **c.flags, BK=b.BK, BV=b.BV, C=C, L=L, ADJOINT=adjoint,
            PREVIOUS=c.previous, SEGMENTS=of_segments, INITIAL=first is not None, FINAL=last is not None, CHUNKS=chunks, REVERSE=reverse,
            STAGES=b.stages,
        )  # fmt: skip

    if L >= c.T:
        walk(start, end, x, False, stored is not None)
        return chunk_states
    segment_states = plan.empty(d + "segment_states", slots, c.H, c.K, c.V)
    segment_decays = plan.empty(d + "segment_decays", slots, c.H, c.K) if c.decay else x
    walk(None, segment_states, segment_decays, True, False)
    BK, BV = min(power(c.K), 64), 16
    steps = contiguous(slots, c.H, c.K, c.V)
    first, given = start if start is not None else (segment_states, steps)
    plan.launch(
        segments.scan, c.N * c.H * math.ceil(c.K / BK) * math.ceil(c.V / BV),
        (segment_states, segment_decays, first, end if end is not None else segment_states, "cu_seqlens"),
        (c.N, c.T, c.H, *given), 2, K=c.K, V=c.V, BK=BK, BV=BV, L=L, DECAY=c.decay, ADJOINT=adjoint,
        INITIAL=start is not None, FINAL=end is not None, PACKED=c.packed,
    )  # fmt: skip
    if stored is None:
        return segment_states
    walk((segment_states, steps), None, x, True, True)
    return chunk_states


def chunk_forward_plan(p: Problem, target: Target, keep: bool = False) -> Plan:
    """``output`` and ``final_state`` by chunks; if ``keep``, ``chunk_states`` for the backward pass too where its chunks are multiples."""
    plan, c = Plan(), Call.of(p, target)
    b = c.blocks("forward")
    BK, grid = power(c.K, LEAST), math.ceil(c.V / b.BV)
    output = plan.empty("output", *p.v.shape, dtype=p.v.dtype)
    final = plan.empty("final_state", *p.state_shape)
    programs = c.N * c.H * grid
    kernel = hopper.forward(p, b, target, c.precision)
    C = plan.C = hopper.C if kernel else b.C
    apart, _ = c.backward_chunk(p)
    meets = apart % C == 0
    L = c.segment(apart if meets else C, programs, b.fill)  # the same whether states are kept or not, and so are results
    dense = c.slots(apart) * apart <= 2 * c.B * c.T  # many short sequences have more slots than tokens
    rounded = kernel is None or c.T > C  # the kernel for Hopper keeps bfloat16, which is too little for a caller's own states
    every = apart if keep and meets and dense and rounded else 0
    chunk_states = plan.empty("chunk_states", c.slots(every), c.H, c.K, c.V, dtype=c.stored(every)) if every else "q"
    state = None if p.initial_state is None else ("initial_state", p.initial_state.stride())
    if L < c.T:
        segment_states = _states(plan, c, ("k", "v"), strides(p.k, p.v), L, C, 1.0, p.reverse, state, final, False, None)
        state = segment_states, contiguous(c.slots(L), c.H, c.K, c.V)
        programs = c.slots(L) * c.H * grid
    else:
        L = 0
    first, steps = state if state is not None else (final, (0, 0, 0, 0))
    resume = plan.empty("resume", programs, dtype=torch.int32) if c.decay == CHANNEL else "q"
    flags: dict[str, Any] = {"L": L, "PREVIOUS": c.previous, "INITIAL": state is not None, "FINAL": L == 0, "EVERY": every}
    if kernel:
        together = hopper.together(c.K, c.V, programs, target)
        plan.launch(
            kernel, programs // together,
            ("q", "k", "v", output, "g", "u", first, output, final, chunk_states, resume, "cu_seqlens"),
            (p.scale, c.N, c.T, c.H, *c.gate, *_bonus(p), *steps), 4, hopper.forward_tiles(c.K), hopper.FORWARD[c.K, together][2],
            K=c.K, V=c.V, PACKED=c.packed, **flags, **hopper.constants(c.K, together),
        )  # fmt: skip
    for tokens, halves, exact in c.launches(C)[kernel is not None :]:
        plan.launch(
            chunk_forward.forward, programs, ("q", "k", "v", "g", "u", "ones", first, output, final, chunk_states, resume, "cu_seqlens"),
            (p.scale, c.N, c.T, c.H, *strides(p.q, p.k, p.v), *c.gate, *_bonus(p), *steps), b.warps, **c.flags, BK=BK, BV=b.BV,
            C=tokens, REVERSE=p.reverse, **flags, STAGES=1 if exact else b.stages, HALVES=halves, EXACT=exact,
        )  # fmt: skip
    return plan


def chunk_backward_plan(
    p: Problem, d_output: Tensor, d_final_state: Tensor | None, target: Target, states: Tensor | None = None, dg: bool = True
) -> Plan:
    """``dq``, ``dk``, ``dv``, ``dg``, ``du`` and ``d_initial_state`` by chunks; a constant decay's dg and du by chunk, to be summed.

    ``states`` are a forward pass's ``chunk_states``; without them they are made again. ``dg``: whether there shall be one.
    """
    plan, c = Plan(), Call.of(p, target)
    b, walk = c.blocks("backward"), c.blocks("states")
    C, kernel = c.backward_chunk(p, d_output)
    plan.C, stored = C, c.stored(C)
    d_initial = None if p.initial_state is None else plan.empty("d_initial_state", *p.state_shape, dtype=p.initial_state.dtype)
    L = c.segment(C, c.N * c.H * math.ceil(c.K / walk.BK) * math.ceil(c.V / walk.BV), walk.fill)
    start = None if p.initial_state is None else ("initial_state", p.initial_state.stride())
    if states is not None and states.shape == (c.slots(C), c.H, c.K, c.V):
        S = "states"
    else:
        S = _states(plan, c, ("k", "v"), strides(p.k, p.v), L, C, 1.0, p.reverse, start, None, False, stored)
    d_start = None if d_final_state is None else ("d_final_state", d_final_state.stride())
    steps = strides(p.q, d_output)
    dS = _states(plan, c, ("q", "d_output"), steps, L, C, p.scale, p.reverse, d_start, d_initial, True, stored)
    slots, launches = c.slots(C), c.launches(C)
    shares = slots * (1 + any(halves for _, halves, _ in launches))
    dq, dk, dv = (plan.empty("d" + name, *x.shape, dtype=x.dtype) for name, x in (("q", p.q), ("k", p.k), ("v", p.v)))
    d_gate = du = "q"
    if p.g is not None and dg:
        d_gate = plan.empty("dg", shares, *p.g.shape) if c.static else plan.empty("dg", *p.g.shape, dtype=p.g.dtype)
    if p.u is not None:
        du = plan.empty("du", shares, c.H, c.K)
    todo = "q"
    if kernel:
        (g_b, g_t, g_h, g_k), (warps, registers) = c.gate, hopper.BACKWARD[c.K]
        todo = plan.empty("todo", slots * c.H, dtype=torch.int32)
        plan.launch(
            kernel, slots * c.H,
            ("q", "k", "v", "d_output", S, dS, "q", "k", "g", "u", S, dq, dk, dv, d_gate, du, todo, "cu_seqlens"),
            (p.scale, c.N, c.T, g_b, g_h, *_bonus(p)), warps, hopper.backward_tiles(c.K), registers,
            q_t=p.q.stride(1), k_t=p.k.stride(1), g_t=g_t, g_k=g_k, H=c.H, K=c.K, C=C, DG=dg, PREVIOUS=c.previous, PACKED=c.packed,
        )  # fmt: skip
    for tokens, halves, exact in launches[kernel is not None :]:
        programs = slots * c.H * (1 + halves)
        noted = plan.empty("todo_halves" if halves else "todo", programs, dtype=torch.int32) if c.decay == CHANNEL and not exact else "q"
        plan.launch(
            chunk_backward.backward, programs,
            ("q", "k", "v", "g", "u", "ones", "d_output", S, dS, dq, dk, dv, d_gate, du, todo, noted, "cu_seqlens"),
            (p.scale, c.N, c.T, c.H, *strides(p.q, p.k, p.v), *c.gate, *_bonus(p), *d_output.stride()), b.warps, **c.flags,
            BK=b.BK, BV=b.BV, C=tokens, DG=p.g is not None and dg, PREVIOUS=c.previous, REVERSE=p.reverse, HALVES=halves, EXACT=exact,
        )  # fmt: skip
        todo = noted
    return plan


def _bonus(p: Problem) -> tuple[int, ...]:
    return p.u.stride() if p.u is not None else (0, 0)


def recurrent_forward_plan(p: Problem, pool: Tensor | None, slots: Tensor | None, target: Target) -> Plan:
    """``output`` and ``final_state`` token by token; with a ``pool`` of states, those are read and written in place at ``slots``."""
    plan, c = Plan(), Call.of(p, target)
    b = c.blocks("recurrent") if pool is None else c.step_blocks()
    output = plan.empty("output", *p.v.shape, dtype=p.v.dtype)
    final = "pool" if pool is not None else plan.empty("final_state", *p.state_shape)
    state = pool if pool is not None else p.initial_state
    first = "pool" if pool is not None else _given("initial_state", state, final)
    last = pool.stride() if pool is not None else contiguous(*p.state_shape)
    plan.launch(
        recurrent.forward, c.N * c.H * math.ceil(c.V / b.BV),
        ("q", "k", "v", "g", "u", first, output, final, "cu_seqlens", _given("slots", slots, "q")),
        (p.scale, c.T, c.H, *strides(p.q, p.k, p.v), *c.gate, *_bonus(p), *(state.stride() if state is not None else last), *last),
        b.warps, K=c.K, V=c.V, BK=power(c.K), BV=b.BV, DECAY=c.decay, PREVIOUS=c.previous, INITIAL=state is not None, PACKED=c.packed,
        REVERSE=p.reverse, SLOTS=slots is not None, PENDING=c.pending,
    )  # fmt: skip
    return plan


def recurrent_backward_plan(p: Problem, d_output: Tensor, d_final_state: Tensor | None, target: Target) -> Plan:
    """All gradients token by token: dv, and of the others (float32) the shares of blocks of V, to be summed."""
    plan, c = Plan(), Call.of(p, target)
    b = c.blocks("recurrent")
    BK, NV = power(c.K), math.ceil(c.V / b.BV)
    kept = c.N * (SPAN + 1) + c.T // SPAN if c.packed else c.N * (SPAN + math.ceil(c.T / SPAN))
    scratch = plan.empty("kept", kept * c.H * NV * BK * (b.BV + 2))
    dq, dk = plan.empty("dq", NV, *p.q.shape), plan.empty("dk", NV, *p.k.shape)
    dv = plan.empty("dv", *p.v.shape, dtype=p.v.dtype)
    dg = du = "q"
    if p.g is not None:
        dg = plan.empty("dg", NV, *(c.N,)[: c.static], *p.g.shape)
    if p.u is not None:
        du = plan.empty("du", NV, c.N, c.H, c.K)
    d_initial = plan.empty("d_initial_state", *p.state_shape)
    own = contiguous(*p.state_shape)
    first, last = (x.stride() if x is not None else own for x in (p.initial_state, d_final_state))
    plan.launch(
        recurrent.backward, c.N * c.H * NV,
        ("q", "k", "v", "g", "u", _given("initial_state", p.initial_state, d_initial), "d_output",
         _given("d_final_state", d_final_state, d_initial), dq, dk, dv, dg, du, d_initial, scratch, "cu_seqlens"),
        (p.scale, c.N, c.T, c.H, c.B * c.T, *strides(p.q, p.k, p.v), *c.gate, *_bonus(p), *first, *d_output.stride(), *last),
        b.warps, K=c.K, V=c.V, BK=BK, BV=b.BV, DECAY=c.decay, STATIC=c.static, PREVIOUS=c.previous, INITIAL=p.initial_state is not None,
        D_FINAL=d_final_state is not None, PACKED=c.packed, REVERSE=p.reverse, SPAN=SPAN,
        PENDING=c.pending,
    )  # fmt: skip
    return plan
