"""What the ranks of a group send to each other. Errors name the function and the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ExchangeError


def exchange(function: str, collective: Callable[..., object], *arguments: Any, group: dist.ProcessGroup) -> None:
    """Make a collective call of ``torch.distributed``. Raises ExchangeError, in the name of ``function``, if it fails."""
    try:
        collective(*arguments, group=group)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        rank = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"
        cause = "A rank has ended, raised an error, made another call, or has other shapes or dtypes. Look for the first error of any rank."
        raise ExchangeError(
            f"{function}: all ranks of the group must take part in {collective.__name__}, got an error on {rank}. {cause} "
            f"torch.distributed: {error}"
        ) from error


def gathered(function: str, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, [R,...], from contiguous ones."""
    found = x.new_empty(dist.get_world_size(group), *x.shape)
    if x.is_cuda:
        exchange(function, dist.all_gather_into_tensor, found, x, group=group)
    else:  # Gloo
        exchange(function, dist.all_gather, list(found.unbind()), x, group=group)
    return found


def summed(function: str, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of contiguous tensors, in their memory."""
    exchange(function, dist.all_reduce, x, group=group)
    return x
