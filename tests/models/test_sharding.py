"""Models sharded by FSDP2 over the ranks of a process group."""

import pytest
import sharded
from architectures import ARCHITECTURES
from ranks import spawned
from torch import nn

import penstock as ps

FAST = ["rwkv6", "mamba2"]
"""Mamba-2 ties its embeddings."""


def test_ranks_equal_one_process():
    spawned(sharded.run, 2, [sharded.trained, sharded.evaluated, sharded.in_bfloat16, sharded.by_torch_alone], FAST)


@pytest.mark.slow
def test_the_classes_for_transformers():
    pytest.importorskip("transformers")
    spawned(sharded.run, 2, [sharded.wrapped], ["rwkv6", "rwkv7", "rwkv7a", "mamba2", "gla", "hybrid"])


@pytest.mark.slow
def test_every_architecture():
    names = [one for one in ARCHITECTURES if one not in FAST]
    spawned(sharded.run, 2, [sharded.trained, sharded.evaluated, sharded.by_torch_alone], names)


@pytest.mark.slow
def test_more_ranks_and_replicas():
    spawned(sharded.run, 4, [sharded.trained, sharded.evaluated, sharded.over_two_axes], FAST)


def test_models_and_groups_are_needed():
    with pytest.raises(ps.DeviceError, match=r"shard: mesh must be one of a process group, got none .* Start the processes with torchrun"):
        ps.distributed.shard(ps.models.CausalLM(ARCHITECTURES["gla"]))
    with pytest.raises(ps.InvalidArgument, match=r"shard: model must be a CausalLM, or a module with one inside, got Linear"):
        ps.distributed.shard(nn.Linear(2, 2))
    with pytest.raises(ps.InvalidArgument, match="got None"):
        ps.distributed.shard(None)
