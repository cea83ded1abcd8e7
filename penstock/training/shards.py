"""Checkpoints of sharded models, by ``torch.distributed.checkpoint``: each rank writes its part, any number of ranks read it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ..models import CausalLM
from ..models.checkpoints.distributed import METADATA

FOLDER = "shards"
"""The folder of a checkpoint with the parts of its model and optimizer."""


def is_sharded(checkpoint: Path) -> bool:
    """Whether a checkpoint is of a sharded model."""
    return (checkpoint / FOLDER / METADATA).is_file()


def write(checkpoint: Path, model: CausalLM, optimizer: torch.optim.Optimizer) -> None:
    """Write the parts of this rank. All ranks call it."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_states(model, optimizer), checkpoint_id=checkpoint / FOLDER)


def restore(checkpoint: Path, model: CausalLM, optimizer: torch.optim.Optimizer) -> None:
    """Read the model and its optimizer. Either may be sharded, over any number of ranks. All ranks call it."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    states = _states(model, optimizer)
    _read(checkpoint, states)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def restore_model(checkpoint: Path, model: CausalLM) -> None:
    """Read the model alone."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    states = {"model": get_model_state_dict(model)}
    _read(checkpoint, states)
    set_model_state_dict(model, states["model"])


def _read(checkpoint: Path, states: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process reads all parts
        try:
            load(states, checkpoint_id=checkpoint / FOLDER, no_dist=not distributed.is_initialized())
        except CheckpointException as error:  # no Exception
            raise ValueError("; ".join(str(one) for one, _ in error.failures.values())) from error


def _states(model: CausalLM, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    found, state = get_state_dict(model, optimizer)
    return {"model": found, "optimizer": state}


def adopt_model(model: CausalLM, weights: dict[str, Any]) -> None:
    """Set the whole weights of a model, sharded or not."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def adopt_optimizer(model: CausalLM, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Set the state of an optimizer of a sharded model from that of a whole one, which counts parameters in their order."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    named: dict[str, Any] = {
        "state": {order[n]: one for n, one in state["state"].items()},
        "param_groups": [{**group, "params": [order[n] for n in group["params"]]} for group in state["param_groups"]],
    }
    set_optimizer_state_dict(model, optimizer, named, options=StateDictOptions(full_state_dict=True))


def gathered(model: CausalLM) -> CausalLM | None:
    """The whole model on the CPU of rank 0; None elsewhere. All ranks call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if distributed.get_rank():
        return None
    with torch.device("meta"):
        whole = CausalLM(model.config)
    whole.load_state_dict(weights, assign=True)
    whole.tie()
    return whole
