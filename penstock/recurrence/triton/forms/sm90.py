"""What the forms in Gluon for Hopper share: which tensors the hardware copies, and blocks of channels."""

from __future__ import annotations

import torch

from ....gpu.hopper import no_matrix, tiled
from ....gpu.plan import far
from ...declaration import Tokens
from ..calls import CHANNEL, Backward, Call
from ..table import KernelConfig

FORM = "hopper"
"""The name of these kernels in the tables of block sizes."""
C, BV = 64, 64
"""Tokens in a chunk, and value channels in a block."""
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


def other_decays(call: Call) -> str | None:
    """Why kernels for decays per channel cannot take a call, or None."""
    return None if call.decay == CHANNEL else "it computes decays per channel"


def size(name: str, x: int, allowed: tuple[int, ...]) -> str | None:
    """Why a kernel with heads of certain sizes cannot take one of x channels, or None."""
    return None if x in allowed else f"{name} must be {' or '.join(map(str, allowed))}, this is {x}"


def multiple(name: str, x: int, of: int) -> str | None:
    """Why a kernel with heads of whole blocks cannot take one of x channels, or None."""
    return None if x % of == 0 else f"{name} must be a multiple of {of}, this is {x}"


def not_copied(call: Call, shared: bool = False) -> str | None:
    """Why the tensor memory accelerator cannot copy the tensors of a call, or None. ``shared``: heads may share q and k."""
    p = call.p
    if p.q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it takes bfloat16, float16 and float32, this is {p.q.dtype}"
    if getattr(p, "reverse", False):
        return "it computes forwards in time"
    if (why := call.other_rows(C, max(C, call.K))) is not None:  # of weights, and of states before chunks
        return why
    d_output = call.d_output if isinstance(call, Backward) else None
    if (why := no_matrix("v", p.v) or no_matrix("the output's gradient", d_output)) is not None:
        return why
    return no_matrix("q", p.q, shared) or no_matrix("k", p.k, shared)


def far_decays(p: Tokens) -> str | None:
    """Why offsets of decays do not fit 32 bits, where their strides are constants of a kernel, or None."""
    if p.gate is None or not any(far(f"g_{axis}", step) for axis, step in zip("bthk", p.gate.stride())):
        return None
    return "offsets of the decay within a tile must fit 32 bits"


def plain_in_table(config: KernelConfig) -> str | None:
    """Why a call takes plain kernels although these can compute it, or None."""
    return None if config.form == FORM else "the table of block sizes has plain kernels here"


def chunk(call: Call) -> int:
    """Tokens in a chunk."""
    return C


def decays_in_tiles(p: Tokens) -> bool:
    """Whether the tensor memory accelerator can copy the decays too."""
    return p.g is not None and "T" in p.variant.decay and tiled(p.g)
