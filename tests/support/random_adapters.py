"""Random adapters, and the models with these in their weights."""

import math

import torch
from architectures import model_of
from torch import nn


def factors_of(model, rank, seed, names=None):
    """Random factors of all linear maps, or of some."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, one in model.named_modules():
        if isinstance(one, nn.Linear) and (names is None or any(part in name for part in names)):
            out, inner = one.weight.shape
            down = torch.randn(rank, inner, generator=generator) / math.sqrt(inner)
            found[f"{name}.weight"] = down, torch.randn(out, rank, generator=generator) / math.sqrt(rank)
    return found


def merged(name, factors, dtype):
    """The model with one adapter in its weights."""
    model = model_of(name, dtype)
    with torch.no_grad():
        for weight, (down, up) in factors.items():
            one = model.get_submodule(weight.removesuffix(".weight"))
            one.weight = nn.Parameter(one.weight + up.to(dtype) @ down.to(dtype))
    return model
