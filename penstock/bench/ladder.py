"""The ladder to the CUDA kernel: one formula, RWKV-6 forward, written six times, each rung faster for a reason that can be read.

The rungs are the files of ``wkv_ladder/``, from the formula taken literally to what published kernels do; the last is the ``cuda``
implementation itself (``recurrence/cuda/forward.cu``). ``penstock bench wkv-ladder`` holds each to the oracle and times it. All have one
signature: r, k, v, decay factors and output [B,T,H,n], bonus [H,n], float32, contiguous, n a multiple of 4. The factors exp(g) are made
beforehand, as those who call such kernels do.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import Complaints, DtypeError, ImplementationRefused, RangeError
from ..recurrence import cuda
from ..verify.inputs import Inputs
from .candidates import Candidate, Mode

HERE = Path(__file__).parent / "wkv_ladder"
RUNGS = {"rung-" + path.stem.partition("_")[2]: path for path in sorted(HERE.glob("*.cu"))}
"""From the lowest: rung-atomics, rung-register, rung-wide, rung-block, rung-shared."""
BUDGET = 1e-4
"""They multiply by rounded float32 decays over and over, as the token loop does."""


@dataclass(frozen=True)
class Rung:
    """One of the files for one head size."""

    name: str
    head: int
    kernel: str = "wkv"

    @property
    def source(self) -> str:
        """The file's text."""
        return RUNGS[self.name].read_text()

    @property
    def macros(self) -> dict[str, str]:
        """The head size is a constant of the kernel."""
        return {"HEAD": str(self.head)}

    @property
    def threads(self) -> int:
        """In a block: one warp, or a head's."""
        return self.head if self.name in ("rung-block", "rung-shared") else 32

    def forward(self, inputs: Inputs, factors: Tensor) -> Tensor:
        """Launch it on inputs and their decay factors; the output."""
        from ..recurrence.cuda import launch

        B, T, H, n, _ = inputs.shape
        output = torch.empty_like(inputs.v)
        assert inputs.u is not None
        tensors = inputs.q, inputs.k, inputs.v, factors, inputs.u, output
        sizes, addresses = (ctypes.c_int(size) for size in (B, T, H)), (ctypes.c_void_p(x.data_ptr()) for x in tensors)
        launch.run(self, -(-B * H * n // self.threads), inputs.q.device, *sizes, *addresses)
        return output


def rung(name: str, inputs: Inputs, mode: Mode) -> Candidate:
    """A rung for these inputs. Raises the exceptions of ``errors.py`` if they are not what it takes."""
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
    reason = cuda.available()
    if reason is not None or inputs.q.device.type != "cuda":
        raise ImplementationRefused(f"bench: {name} cannot be timed here: {reason or 'its inputs are not on a GPU'}.")
    assert inputs.g is not None
    factors = inputs.g.float().exp()

    def step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    return Candidate(name, lambda inputs: Rung(name, inputs.shape.K).forward(inputs, factors), step, lambda inputs, result: BUDGET)
