"""The processes that train one model, as ``torchrun`` starts them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..distributed import ContextParallel
from ..errors import Complaints, RangeError
from .settings import FUNCTION, Settings


@dataclass(frozen=True)
class Ranks:
    """The place of this process among all. Ranks that are neighbours share the tokens of the same samples."""

    dp: int = 1
    """Parts of a batch."""
    cp: int = 1
    """Parts of a sample."""
    rank: int = 0

    @property
    def count(self) -> int:
        """All processes."""
        return self.dp * self.cp

    @property
    def part(self) -> int:
        """The part of a batch that this process has."""
        return self.rank // self.cp

    @property
    def slice(self) -> int:
        """The part of a sample that this process has."""
        return self.rank % self.cp


Context = Callable[[int, Tensor | None], tuple[slice, ContextParallel]]
"""From the tokens of a batch and the offsets of its packed sequences to the tokens of this rank, and the context of their calls."""


def find_ranks(settings: Settings) -> Ranks:
    """The processes that ``torchrun`` started, as ``mesh`` arranges them. Raises RangeError if they do not fit the settings."""
    mesh, batch, complaints = settings.mesh, settings.training.batch_size, Complaints(FUNCTION)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    dp = max(count // mesh.cp, 1) if mesh.dp is None else mesh.dp
    if dp * mesh.cp != count:
        given = ["mesh.dp"] * (mesh.dp is not None) + ["mesh.cp"] * (mesh.cp > 1)
        remedy = f"Start torchrun --nproc-per-node {dp * mesh.cp} -m penstock train CONFIG.yaml, or leave out {' and '.join(given)}."
        complaints.add(RangeError, "mesh", f"of {count} process{'es' * (count > 1)}", f"dp {dp} * cp {mesh.cp} = {dp * mesh.cp}", remedy)
    elif batch % dp:
        remedy = "It counts the samples of all ranks."
        complaints.add(RangeError, "training.batch_size", f"a multiple of the {dp} ranks of mesh.dp", batch, remedy)
    complaints.raise_any()
    return Ranks(dp, mesh.cp, int(os.environ.get("RANK", "0")))


def join(ranks: Ranks, device: str) -> None:
    """Initialise the process group of several processes: Gloo for CPUs, NCCL for GPUs. A GPU for each process of a host."""
    from torch import distributed

    if ranks.count == 1 or distributed.is_initialized():
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")


def context_of(ranks: Ranks, device: str) -> Context | None:
    """A function that cuts batches over the ranks of ``mesh.cp``; None for one rank."""
    if ranks.cp == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, (ranks.dp, ranks.cp), mesh_dim_names=("dp", "cp"))["cp"]

    def cut(tokens: int, cu_seqlens: Tensor | None) -> tuple[slice, ContextParallel]:
        borders = [tokens * n // ranks.cp for n in range(ranks.cp + 1)]
        part, lengths = slice(*borders[ranks.slice : ranks.slice + 2]), [end - begin for begin, end in pairwise(borders)]
        return part, ContextParallel(mesh, tokens=lengths[ranks.slice], lengths=lengths, cu_seqlens=cu_seqlens)

    return cut


def leave() -> None:
    """End the process group, if there is one."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
