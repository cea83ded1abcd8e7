"""Models of every architecture in transformers' classes, and their tokens."""

import torch
from architectures import SIZES, model_of
from torch import Tensor

from penstock.models.huggingface import PenstockForCausalLM

SMALL = ["rwkv6", "gla", "retnet", "linear", "mamba2", "hybrid"]
"""One architecture of each kind of state."""


def wrapped(name: str, dtype: torch.dtype = torch.float64) -> PenstockForCausalLM:
    """The random model of an architecture."""
    return PenstockForCausalLM.of(model_of(name, dtype).eval())


def drawn(*shape: int, seed: int = 4) -> Tensor:
    """Random tokens."""
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))
