"""The passes of the Triton implementation: each runs a plan on the tensors of a problem."""

from __future__ import annotations

from torch import Tensor

from ...gpu import launch
from ...gpu.plan import dense
from ...gpu.target import Target
from ..declaration import Attention
from . import plan


def _tensors(a: Attention) -> dict[str, Tensor | None]:
    return {"q": a.q, "k": a.k, "v": a.v, "cu_seqlens": dense(a.cu_seqlens), "cu_seqlens_k": dense(a.key_offsets)}


def forward(a: Attention) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    found = launch.run("forward", a, Target.of, lambda target: plan.forward_plan(a, target), _tensors(a))
    return found["output"], found["lse"]


def backward(a: Attention, d_output: Tensor, d_lse: Tensor | None, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    output, lse = output.contiguous(), lse.contiguous()  # no copy, unless saved-tensor hooks changed them
    tensors = _tensors(a) | {"output": output, "lse": lse, "d_output": d_output, "d_lse": d_lse}
    more = d_output, d_lse, output, lse
    found = launch.run("backward", a, Target.of, lambda target: plan.backward_plan(a, d_output, d_lse, target), tensors, *more)
    return found["dq"], found["dk"], found["dv"]
