"""Kernels of the delta rule of other projects as peers.

Each is called as its package says: FlashKDA and FlashRWKV2 take logits in bfloat16 in place of decays and beta, cuDNN takes one long
sequence with offsets. What they take is made before the clock starts. A package that is missing, or a call that it does not take, is a
refusal with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..errors import ImplementationRefused
from ..tokens.decays import FASTEST
from ..tokens.distributions import BOUND
from ..verify.inputs import Inputs
from .candidates import Candidate, Mode
from .clock import on_gpu
from .fla import BUDGET


@dataclass(frozen=True)
class Package:
    """A package with kernels of some variants."""

    distribution: str
    """Its name on PyPI."""
    module: str
    variants: tuple[str, ...]
    modes: tuple[Mode, ...]
    heads: tuple[int, ...]
    """Sizes of heads, K = V."""
    make: Callable[[str, Inputs], Candidate]
    not_captured: Mapping[Mode, str] = field(default_factory=dict)
    """Why calls of a mode are not captured in CUDA graphs."""

    def refusal(self, inputs: Inputs, mode: Mode) -> str | None:
        """Why it does not take these inputs, or None. A call may still raise."""
        shape = inputs.shape
        if inputs.variant not in self.variants:
            return f"it has no kernel for {inputs.variant}"
        if mode not in self.modes:
            return f"it has no {'backward pass' if mode == 'fwdbwd' else 'decode step of states in a pool'}"
        if inputs.q.dtype != torch.bfloat16:
            return f"it takes bfloat16, and the inputs are {str(inputs.q.dtype).removeprefix('torch.')}"
        if shape.K != shape.V or shape.K not in self.heads:
            return f"it takes heads of {' or '.join(map(str, self.heads))}, and these have K = {shape.K}, V = {shape.V}"
        return None


def names(variant: str) -> tuple[str, ...]:
    """The peers of a variant."""
    return tuple(name for name, package in PACKAGES.items() if variant in package.variants)


def installed() -> dict[str, str]:
    """Versions of these packages, and of the compiler that some need, by name on PyPI."""
    found = {}
    for name in (*(package.distribution for package in PACKAGES.values()), "tilelang"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def candidate(name: str, inputs: Inputs, mode: Mode) -> Candidate:
    """The candidate of this name; one that refuses every call, with the reason, if it cannot run here."""
    package = PACKAGES[name]
    reason = package.refusal(inputs, mode)
    if find_spec(package.module) is None:
        reason = f"it is not installed (pip install {package.distribution})"
    elif not on_gpu(inputs.q.device):
        reason = f"it needs a GPU and the inputs are on {inputs.q.device}"
    if reason is not None:
        return refusing(name, reason)
    return replace(package.make(name, inputs), not_captured=package.not_captured.get(mode))


def refusing(name: str, reason: str) -> Candidate:
    """A candidate that takes no call."""

    def refuse(*_: object) -> Any:
        raise ImplementationRefused(reason)

    return Candidate(name, refuse, refuse, _budget, arguments=refuse)


def _budget(inputs: torch.dtype, result: torch.dtype) -> float:
    return BUDGET[inputs]


def _none(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The step of a package without decode steps."""
    raise NotImplementedError


def logits(x: Tensor) -> Tensor:
    """The bfloat16 logits of numbers from 0 to 1."""
    return torch.logit(x.double()).bfloat16()


def gate_logits(g: Tensor | None, bound: float) -> Tensor:
    """The bfloat16 x of log decays ``bound * sigmoid(x)``. Refuses log decays that have none: random ones within the bound have them."""
    assert g is not None
    found = logits(g / bound)
    if not torch.allclose(bound * torch.sigmoid(found.double()), g.double(), rtol=1e-4, atol=0):
        raise ImplementationRefused(f"its log decays are {bound:.4g} sigmoid(x) of bfloat16 x, and these are not")
    return found


def gradient_of_decays(x: Inputs, found: dict[str, Tensor], bound: float) -> dict[str, Tensor]:
    """Gradients by name with that of log decays ``bound * sigmoid(x)`` in place of that of x."""
    assert x.g is not None
    logit = gate_logits(x.g, bound).double()
    slope = bound * torch.sigmoid(logit) * torch.sigmoid(-logit)
    return found | {"g": (found["g"].double() / slope).to(x.g.dtype)}


def _flash_kda(name: str, inputs: Inputs) -> Candidate:
    """FlashKDA: forward, log decays from -5, which it computes as -5 sigmoid(exp(A_log) (x + dt_bias)). It normalises q and k."""
    module, shape, scale = import_module("flash_kda"), inputs.shape, inputs.scale
    A_log = torch.zeros(shape.H, device=inputs.q.device)
    dt_bias = torch.zeros(shape.H, shape.K, device=inputs.q.device)

    def arguments(x: Inputs) -> Inputs:
        return replace(x, g=gate_logits(x.g, BOUND), others={"beta": logits(x.others["beta"])})

    def forward(x: Inputs) -> Tensor:
        output = torch.empty_like(x.v)
        module.fwd(x.q, x.k, x.v, x.g, x.others["beta"], scale, output, A_log=A_log, dt_bias=dt_bias, lower_bound=BOUND)
        return output

    return Candidate(name, forward, _none, _budget, arguments=arguments)


def _cudnn(name: str, inputs: Inputs) -> Candidate:
    """Kernels of cuDNN for Hopper: natural log decays and beta in float32, sequences behind each other."""
    function = import_module("cudnn.linear_attention.ops").kimi_delta_attention
    (B, T, *_), scale = inputs.shape, inputs.scale
    offsets = torch.arange(B + 1, dtype=torch.int32, device=inputs.q.device) * T

    def forward(x: Inputs) -> Tensor:
        q, k, v, g, beta = (given.flatten(0, 1) for given in x.tensors.values())
        output: Tensor = function(q, k, v, g, beta, offsets, scale=scale, plan_name="kda_hopper_cuda")[0].unflatten(0, (B, T))
        return output

    return Candidate(name, forward, _none, _budget)


def _flash_qla(name: str, inputs: Inputs) -> Candidate:
    """FlashQLA: natural log decays, one per head; heads of v may share heads of q and k."""
    function, scale = import_module("flash_qla").chunk_gated_delta_rule, inputs.scale

    def forward(x: Inputs) -> Tensor:
        output: Tensor = function(**x.tensors, scale=scale)[0]
        return output

    return Candidate(name, forward, _none, _budget)


def _flash_rwkv(name: str, inputs: Inputs) -> Candidate:
    """FlashRWKV2: RWKV-7 token by token, with its own -exp(-1/2) sigmoid(x) of bfloat16 logits. Its gradient is that of the logits."""
    module, shape = import_module("flashrwkv2"), inputs.shape
    offsets = torch.arange(shape.B + 1, dtype=torch.int32, device=inputs.q.device)
    slots = offsets[:-1] if inputs.slots is None else inputs.slots.int()
    tickets: dict[int, object] = {}

    def arguments(x: Inputs) -> Inputs:
        return replace(x, g=gate_logits(x.g, FASTEST))

    def forward(x: Inputs) -> Tensor:
        q, k, v, g, a, b = (given.flatten(2) for given in x.tensors.values())
        flat = module.pretrain_tmix_wkv7_recurrent_bf16(q, g, k, v, a, b, head_size=shape.K)
        output: Tensor = flat.unflatten(2, (shape.H, shape.V))
        return output

    def gradients(x: Inputs, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return gradient_of_decays(x, found, FASTEST)

    def step(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
        rows = state.shape[0]
        if rows not in tickets:  # a server makes it once for all layers of a step
            tickets[rows] = module.prepare_tmix_wkv7_recurrent_metadata(offsets, slots, total_tokens=shape.B, state_pool_size=rows)
        q, k, v, g, a, b = (given.flatten(0, 1) for given in x.tensors.values())
        pool = module.prepare_tmix_wkv7_recurrent_fp32io16_state_from_tensor(state)
        output = module.infer_tmix_wkv7_recurrent_fp32io16_forward_varlen(
            q, g, k, v, a, b, state=pool, cu_seqlens=offsets, state_indices=slots, validated_metadata=tickets[rows]
        )
        return output.unflatten(0, (shape.B, 1)), state

    return Candidate(name, forward, step, _budget, arguments=arguments, gradients=gradients)


PACKAGES = {
    "flash_kda": Package("tokenspeed-flashkda", "flash_kda", ("kda",), ("fwd",), (128,), _flash_kda),
    "cudnn": Package(
        "nvidia-cudnn-frontend", "cudnn", ("kda",), ("fwd", "fwdbwd"), (128,), _cudnn, {"fwdbwd": "its backward pass cannot be captured"}
    ),
    "flash_qla": Package("flash-qla", "flash_qla", ("gated_delta_rule",), ("fwd", "fwdbwd"), (128,), _flash_qla),
    "flash_rwkv": Package("FlashRWKV2", "flashrwkv2", ("rwkv7",), ("fwd", "fwdbwd", "decode"), (64, 128, 256), _flash_rwkv),
}
"""Packages by the peer's name."""
