"""The CUDA ladder: the RWKV-6 forward pass as a sequence of kernels, each with one more optimisation.

The rungs are the files of ``wkv_ladder/``, from a literal kernel of the formula to the design of published kernels. The last step is the
``cuda`` implementation (``recurrence/cuda/forward.cu``). ``penstock bench wkv-ladder`` compares each with the oracle and times it. All
rungs have the same signature: r, k, v, decay factors and output [B,T,H,n], bonus [H,n], float32, contiguous, n a multiple of 4. The
decay factors exp(g) are computed beforehand, as callers of such kernels do.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import Complaints, DtypeError, ImplementationRefused, RangeError
from ..gpu import nvrtc
from ..verify.inputs import Inputs
from .candidates import Candidate, Mode

HERE = Path(__file__).parent / "wkv_ladder"
RUNGS = {"rung-" + path.stem.partition("_")[2]: path for path in sorted(HERE.glob("*.cu"))}
"""From the first: rung-atomics, rung-register, rung-wide, rung-block, rung-shared."""
BUDGET = 1e-4
"""Largest error allowed: like the token loop, the rungs multiply repeatedly by rounded float32 decays."""


@dataclass(frozen=True)
class Rung:
    """One rung for one head size."""

    name: str
    head: int
    kernel: str = "wkv"

    @property
    def source(self) -> str:
        """The source code."""
        return RUNGS[self.name].read_text("utf-8")

    @property
    def macros(self) -> dict[str, str]:
        """Macros of the compiler: the head size is a constant of the kernel."""
        return {"HEAD": str(self.head)}

    @property
    def threads(self) -> int:
        """Threads of a block: one warp, or one thread for each channel of a head."""
        return self.head if self.name in ("rung-block", "rung-shared") else 32

    def forward(self, inputs: Inputs, factors: Tensor) -> Tensor:
        """Launch the kernel on inputs and their decay factors, and return the output."""
        B, T, H, n, _ = inputs.shape
        output = torch.empty_like(inputs.v)
        assert inputs.u is not None
        tensors = inputs.q, inputs.k, inputs.v, factors, inputs.u, output
        sizes, addresses = (ctypes.c_int(size) for size in (B, T, H)), (ctypes.c_void_p(x.data_ptr()) for x in tensors)
        nvrtc.run(self, -(-B * H * n // self.threads), inputs.q.device, *sizes, *addresses)
        return output


def rung(name: str, inputs: Inputs, mode: Mode) -> Candidate:
    """The candidate of a rung. Raises the exceptions of ``errors.py`` if the rung does not take these inputs."""
    complaints = Complaints(f"bench: {name}")
    if inputs.variant != "rwkv6":
        complaints.add(RangeError, "variant", "rwkv6", inputs.variant)
    if mode != "fwd":
        complaints.add(RangeError, "mode", "fwd", mode)
    if inputs.q.dtype != torch.float32:
        complaints.add(DtypeError, "dtype", "float32", inputs.q.dtype)
    if inputs.shape.K != inputs.shape.V or inputs.shape.K % 4:
        complaints.add(RangeError, "shape", "one of equal K and V, a multiple of 4", inputs.shape.text)
    complaints.raise_any()
    reason = nvrtc.available()
    if reason is not None or inputs.q.device.type != "cuda":
        raise ImplementationRefused(f"bench: {name} cannot be timed here: {reason or 'its inputs are not on a GPU'}.")
    assert inputs.g is not None
    factors = inputs.g.float().exp()

    def step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    return Candidate(name, lambda inputs: Rung(name, inputs.shape.K).forward(inputs, factors), step, lambda inputs, result: BUDGET)
