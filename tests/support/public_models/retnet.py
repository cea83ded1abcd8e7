"""RetNet: fla's names. Blocks, norms and gates are those of gla.py."""

from __future__ import annotations

import torch
from torch import Tensor

from . import Weights, gla


def config(**changes: object) -> dict[str, object]:
    """fla's config.json with few channels."""
    retnet = {"model_type": "retnet", "architectures": ["RetNetForCausalLM"], "expand_k": 1.0, "expand_v": 2.0, "hidden_ratio": 2}
    return gla.config(**retnet | changes)


draw = gla.draw


def logits(weights: Weights, config: dict, tokens: Tensor) -> Tensor:
    """One sequence [T]: logits [T,vocabulary]."""
    return gla.model(weights, config, tokens, mixer)


def mixer(x: Tensor, memory: gla.Memory, w: Weights, config: dict) -> Tensor:
    """One token x [C]."""
    q, k, v = gla.project(x, memory, w, config)
    q, k = gla.rotated(q, memory.position), gla.rotated(k, memory.position)
    memory.position += 1
    H, K, _ = memory.S.shape
    shared = H // len(k)
    outputs, states = [], []
    for h in range(H):
        one = h // shared
        states.append((1 - 2.0 ** (-5 - h)) * memory.S[h] + torch.outer(k[one], v[one]))
        outputs.append(K**-0.5 * q[h] @ states[-1])
    memory.S = torch.stack(states)
    return gla.output(torch.stack(outputs), x, w, config)
