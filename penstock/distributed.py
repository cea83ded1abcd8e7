"""Work over several devices: context parallelism of operators, and models whose parameters are sharded. See docs/scaling.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from .errors import Complaints, DeviceError, DtypeError, described
from .tokens.context import ContextParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ContextParallel", "shard"]

METHODS = ("loss", "hidden", "advance", "generate")
"""Methods of models that compute without ``forward``."""

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model, mesh: DeviceMesh | None = None, *, param_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True, cpu_offload: bool = False,
) -> Model:  # fmt: skip
    """Shard parameters, gradients and optimizer states of a model over the ranks of a mesh by FSDP2, in place, and return the model.

    The same as these lines of torch::

        for layer in model.layers:
            fully_shard(layer, mesh=mesh, ...)
            register_fsdp_forward_method(layer, "advance")
        fully_shard(model, mesh=mesh, reshard_after_forward=False, ...)
        for name in ("loss", "hidden", "advance", "generate"):
            register_fsdp_forward_method(model, name)

    Make the optimizer afterwards. All ranks call the methods of the model in the same order, each with tokens of its own. Gradients are
    means over ranks.

    model : nn.Module
        A ``CausalLM``, one of the Hugging Face classes, or a module with one inside. The same on every rank.
    mesh : DeviceMesh, optional
        One axis, or two: replicas, and the ranks that share the parameters of a replica. Default: one axis of all ranks.
    param_dtype, reduce_dtype : torch.dtype, optional
        The dtype in which layers get their parameters, and that of gradients while ranks sum them. Default: that of the parameters.
    reshard_after_forward : bool
        Whether the whole parameters of a layer are freed after its forward pass; the backward pass gathers them again. Embeddings, the
        last norm and the head stay whole until the backward pass.
    cpu_offload : bool
        Whether parameters, gradients and optimizer states are in the memory of the host.

    Raises DtypeError for a module without a model, DeviceError without a process group.
    """
    import torch.distributed as dist

    from .layers.as_written import unwrapped
    from .models.backbone import Backbone

    complaints = Complaints("shard")
    inner = unwrapped(model, Backbone) if isinstance(model, nn.Module) else None
    if inner is None:
        value = type(model).__name__ if isinstance(model, nn.Module) else described(model)
        complaints.add(DtypeError, "model", "a CausalLM, or a module with one inside", value)
    if not (dist.is_available() and dist.is_initialized()):
        remedy = "Start the processes with torchrun, and call torch.distributed.init_process_group()."
        complaints.add(DeviceError, "mesh", "one of a process group", "none that is initialised", remedy)
    complaints.raise_any()
    assert inner is not None
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method

    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if cpu_offload else OffloadPolicy()
    for layer in inner.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision, offload_policy=offload)
        if hasattr(layer, "advance"):
            register_fsdp_forward_method(layer, "advance")
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=precision, offload_policy=offload)
    for name in METHODS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    return model
