"""When the Hopper kernels replace the plain chunk kernels, and their launch parameters.

``hopper_forward`` and ``hopper_backward`` take any decay. At K = 256 there are not enough registers for the state and the tiles of all
levels. There ``hopper_weights`` makes the tiles for ``hopper_walk``, which has the states. In place and in ``hopper_backward`` a program
takes 128 of the key channels, and ``blocks.py`` sums the outputs of updates in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu.hopper import Tile, modules, tiled, tiled_or_shared
from ...gpu.plan import far
from ...gpu.target import Target
from ..declaration import Advance, Recurrence, Tokens
from .table import KernelConfig

FORM = "hopper"
"""The name of the Hopper kernels in the tables."""
C, BV = 64, 64
"""Tokens in a chunk, and value channels in a block."""
STAGES, SLOTS = 2, 4
"""Stages of tiles of q, k and v, and slots for tiles with factors. With these, two programs fit on a multiprocessor at K = 64."""
FORWARD = {64: (4, 136, 128), 128: (8, 152, 168)}
"""By K: warps of ``prepare``, registers of their threads, and registers of every thread at launch. With fewer, ``prepare`` spills; with
more, the warps that hold the state spill."""
FORWARD_FLOAT = (4, 240, 255)
"""The same of float32 at K = 64. One program fits on a multiprocessor. With 200, not 240, rwkv6 spills 88 bytes (compiled, not timed)."""
BLOCKS = {256: 2}
"""By K: blocks of key channels, if more than one. Of float32, a block has 64 channels."""


def blocks(p: Tokens) -> int:
    """Blocks of key channels of a head."""
    K = p.sizes["K"]
    return max(K // 64, 1) if p.q.dtype == torch.float32 and K % 64 == 0 else BLOCKS.get(K, 1)


def parts(p: Tokens) -> int:
    """Of how many float16 tiles the sum is an operand of float32: 2, or 1 where torch allows TF32. 0: inputs have 16 bits."""
    if p.q.dtype != torch.float32:
        return 0
    return 2 if torch.get_float32_matmul_precision() == "highest" else 1


BACKWARD = {64: (8, 128), 128: (8, 255)}
"""By K: warps, and registers of their threads. At K = 64 two programs fit on a multiprocessor."""
BACKWARD_FLOAT = (8, 255)
"""The same of float32 at K = 64. One program fits on a multiprocessor."""


WALKED = (256,)
"""K of heads whose chunks are walked by ``hopper_walk`` behind ``hopper_weights``, instead of block by block; but not in place."""
WEIGHTS = (8, 128)
"""Warps of ``hopper_weights``, and registers of their threads. Two programs fit on a multiprocessor."""


def kernels() -> tuple[Any, Any] | None:
    """The forward and the backward kernel; None if this Triton has no Gluon for Hopper."""
    found = modules(__package__)
    return found and (found[0].penstock_chunk_fwd_hopper, found[1].penstock_chunk_bwd_hopper)


class Walk(NamedTuple):
    """The kernels of heads whose chunks are walked."""

    weights: Any
    walk: Any


def walk(p: Recurrence, config: KernelConfig, target: Target, *d_output: Tensor) -> Walk | None:
    """The kernels if the table selects them and they support this problem, or None."""
    suits = p.sizes["K"] in WALKED and p.sizes["V"] % BV == 0 and not parts(p) and _near(p) and _suits(p, config, target, *d_output)
    if not suits or kernels() is None:
        return None
    from . import hopper_walk, hopper_weights

    return Walk(hopper_weights.penstock_chunk_weights_hopper, hopper_walk.penstock_chunk_walk_hopper)


SCALAR = {64: (4, 0), 128: (8, 128)}
"""By K: warps of ``hopper_walk_forward`` and ``hopper_walk_backward``, and the limit of registers of their threads, 0 if none is needed.
Two programs fit on a multiprocessor."""


class Scalar(NamedTuple):
    """The kernels that walk over whole sequences without decays per channel, of heads of 64 value channels, and their launches."""

    forward: Any
    backward: Any
    warps: int
    registers: int
    shared: tuple[int, int]
    """Channels between heads of q and of k; 0 if all heads share one."""
    tiles: tuple[Tile, ...]
    """Of q, k, v, the output (or its gradient) and states before chunks."""


def scalar(p: Recurrence, target: Target, *d_output: Tensor) -> Scalar | None:
    """The kernels if they support this problem, or None."""
    K, V, T = (p.sizes[axis] for axis in "KVT")
    suits = "K" not in p.variant.decay and not p.variant.bonus and K in SCALAR and V == C < T and not p.partial
    if not suits or p.q.dtype != torch.bfloat16 or not _copied(p, target, True, *d_output) or kernels() is None:
        return None
    from . import hopper_walk_backward, hopper_walk_backward_wide, hopper_walk_forward

    wide = hopper_walk_backward_wide.penstock_walk_bwd_wide_hopper
    backward = hopper_walk_backward.penstock_walk_bwd_hopper if K == C else wide
    heads = (p.q.stride(2), p.k.stride(2)) if p.sizes["H"] > 1 else (K, K)
    tiles = *[Tile(C, K)] * 2, *[Tile(C, V)] * 2, Tile(K, V, 3)
    return Scalar(hopper_walk_forward.penstock_walk_fwd_hopper, backward, *SCALAR[K], heads, tiles)


STATES = {64: (4, 2), 128: (8, 1)}
"""By K: warps of ``hopper_segments``, and programs that fit on a multiprocessor."""


class States(NamedTuple):
    """The kernels for the sums of segments and for the states before chunks, and their launches."""

    sums: Any
    walk: Any
    warps: int
    programs_per_sm: int
    parts: int
    """Value channels of a program for sums, per 64. Other programs have 64, so their segments are cut in as many parts for the sums."""
    tiles: tuple[Tile, ...]
    """Of x, 64 channels of y, and decays."""
    constants: dict[str, Any]


def states(p: Recurrence, config: KernelConfig, target: Target, *d_output: Tensor) -> States | None:
    """The kernels if the table selects the Hopper kernels and they support this problem, or None."""
    K, V = p.sizes["K"], p.sizes["V"]
    if K not in STATES or V % BV or parts(p) or not _suits(p, config, target, *d_output) or kernels() is None:
        return None
    from . import hopper_segments as found

    constants = {"K": K, "V": V, "TILED": decays_in_tiles(p), "STATIC": "T" not in p.variant.decay}
    tiles = Tile(C, K), Tile(C, BV), Tile(C, K)
    halves = 1 if V % (2 * BV) else 2
    return States(found.penstock_segment_sums_hopper, found.penstock_chunk_states_hopper, *STATES[K], halves, tiles, constants)


class Forward(NamedTuple):
    """A forward kernel and its launch."""

    kernel: Any
    blocks: int
    """Blocks of key channels of a head."""
    programs_per_sm: int
    """Programs on each multiprocessor for which sequences are cut into segments."""
    tiles: tuple[Tile, ...]
    registers: int
    """Registers of each thread at launch."""
    constants: dict[str, Any]


def forward(p: Recurrence | Advance, config: KernelConfig, target: Target) -> Forward | None:
    """The forward kernel and its launch if the table selects it and it supports this problem, or None."""
    V, count, PARTS = p.sizes["V"], blocks(p), parts(p)
    K = p.sizes["K"] // count
    suits = K in FORWARD and config.BV == BV and V % BV == 0 and _suits(p, config, target)
    found = kernels() if suits and not (p.partial and count == 1) else None
    if not found:
        return None
    warps, registers, first = FORWARD_FLOAT if PARTS else FORWARD[K]
    constants = {
        "K": K, "V": V, "BLOCKS": count, "STAGES": STAGES, "SLOTS": SLOTS, "WARPS": warps, "REGISTERS": registers,
        "TILED": decays_in_tiles(p), "STATIC": "T" not in p.variant.decay, "PARTS": PARTS,
    }  # fmt: skip
    tiles = *[Tile(C, K)] * 2, *[Tile(C, BV)] * 2, Tile(C, K)
    return Forward(found[0], count, 1 if PARTS else config.programs_per_sm, tiles, first, constants)


class Backward(NamedTuple):
    """The backward kernel and its launch."""

    kernel: Any
    blocks: int
    """Blocks of key channels of a head."""
    K: int
    """Key channels of a block, and value channels of a block."""
    values: int
    """Blocks of value channels of a head."""
    parts: int
    """Of float32 operands, see ``parts``."""

    @property
    def launch(self) -> tuple[int, int]:
        """Warps, and registers of their threads."""
        return BACKWARD_FLOAT if self.parts else BACKWARD[self.K]

    @property
    def apart(self) -> bool:
        """Whether another launch computes dv."""
        return self.blocks * self.values > 1


def backward(p: Recurrence, config: KernelConfig, target: Target, *d_output: Tensor) -> Backward | None:
    """The backward kernel, or None. The plain kernel computes calls of one chunk."""
    count = blocks(p)
    K, V = p.sizes["K"] // count, p.sizes["V"]
    suits = K in BACKWARD and V % K == 0 and p.sizes["T"] > C and _near(p) and _suits(p, config, target, *d_output)
    if not suits or kernels() is None:
        return None
    from . import hopper_backward, hopper_backward_parts

    kernel = hopper_backward_parts.penstock_chunk_bwd_parts_hopper if parts(p) else hopper_backward.penstock_chunk_bwd_hopper
    one = Backward(kernel, count, K, V // K, parts(p))
    return None if p.partial and not one.apart else one


def _suits(p: Recurrence | Advance, config: KernelConfig, target: Target, *d_output: Tensor) -> bool:
    """Whether the call has decays per channel, and the table and the tensors suit."""
    return config.form == FORM and "K" in p.variant.decay and _copied(p, target, False, *d_output)


def _near(p: Tokens) -> bool:
    """Whether offsets of decays fit 32 bits, where their strides are constants of a kernel."""
    return p.gate is None or not any(far(f"g_{axis}", step) for axis, step in zip("bthk", p.gate.stride()))


def _copied(p: Recurrence | Advance, target: Target, shared: bool, *d_output: Tensor) -> bool:
    """Whether the call has tensors that the tensor memory accelerator can copy. ``shared``: heads may share q and k."""
    sizes = p.sizes
    return (
        target.arch == "sm_90"
        and p.q.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and not p.reverse
        and 0 < sizes["B"] * sizes["T"] < 1 << 31
        and all(map(tiled_or_shared if shared else tiled, (p.q, p.k)))
        and all(map(tiled, (p.v, *d_output)))
    )


def decays_in_tiles(p: Tokens) -> bool:
    """Whether the tensor memory accelerator can copy the decays too."""
    return p.g is not None and "T" in p.variant.decay and tiled(p.g)


def backward_tiles(one: Backward, states: bool) -> tuple[Tile, ...]:
    """The tiles of the backward kernel's first tensors: q, k, v, dO and, if they have 16 bits, states and their gradients.

    With several blocks, steps of BV of V. With one, the gradients of states are in dv and, at K = 128, dq, behind them.
    """
    if one.parts:
        return (Tile(C, one.K),) * 4
    K, W = one.K, BV if one.apart else one.K
    in_rows = 0 if one.apart else K // C
    return *[Tile(C, K)] * 2, *[Tile(C, W)] * 2, *([Tile(K, W, 3)] * 2 + [Tile(C, BV)] * in_rows) * states
