"""RWKV-7 ("Goose", x070): the formulas in BlinkDL's names, and the layouts of other projects."""

import math

import torch
from torch import Tensor

from public_models import Weights, below, depth, doubled, layer_norm, sigmoid

LOW_RANK = {"w": 5, "a": 4, "v": 3, "g": 6}


def draw(layers: int = 2, dtype=torch.float32, first: bool = False) -> Weights:
    """Random weights of a small model; ``first``: also the unused v0, v1 and v2 of layer 0, which some files have."""
    generator, vocab_size, C, A, heads, F = torch.Generator().manual_seed(7), 13, 16, 16, 2, 40

    def random(*shape: int, size: float = 0.3, mean: float = 0.0) -> Tensor:
        return (mean + size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    w = {"emb.weight": random(vocab_size, C, size=1.0)}
    for i in range(layers):
        for norm in ("ln1", "ln2", "ln0")[: 3 if i == 0 else 2]:
            w |= {f"blocks.{i}.{norm}.weight": random(C, mean=1.0), f"blocks.{i}.{norm}.bias": random(C)}
        att, ffn = f"blocks.{i}.att.", f"blocks.{i}.ffn."
        w |= {f"{att}x_{one}": random(1, 1, C, mean=0.5) for one in "rwkvag"}
        for one, rank in LOW_RANK.items():
            if one != "v" or i > 0 or first:
                w |= {f"{att}{one}1": random(C, rank), f"{att}{one}2": random(rank, A)}
                w |= {f"{att}{one}0": random(1, 1, A, size=1.0)} if one != "g" else {}
        w |= {f"{att}k_k": random(1, 1, A, mean=0.8), f"{att}k_a": random(1, 1, A, mean=1.0), f"{att}r_k": random(heads, A // heads)}
        w |= {f"{att}{one}.weight": random(A, C) for one in ("receptance", "key", "value")} | {f"{att}output.weight": random(C, A)}
        w |= {f"{att}ln_x.weight": random(A, mean=1.0), f"{att}ln_x.bias": random(A)}
        w |= {f"{ffn}x_k": random(1, 1, C, mean=0.5), f"{ffn}key.weight": random(F, C), f"{ffn}value.weight": random(C, F)}
    return w | {"ln_out.weight": random(C, mean=1.0), "ln_out.bias": random(C), "head.weight": random(vocab_size, C)}


def time_mix(x: Tensor, p: Tensor, S: Tensor, w: Weights, first: Tensor | None, eps: float = 64e-5) -> tuple[Tensor, Tensor, Tensor]:
    """One token x [C] after p, the state S [H,V,K] as its authors write it, and v of layer 0: y, the new state, and v before mixing."""
    H, n = w["r_k"].shape
    mixed = {one: x + (p - x) * w[f"x_{one}"].reshape(-1) for one in "rwkvag"}
    flat = {name: one.reshape(-1) for name, one in w.items() if name[:-1] in ("w", "a", "v", "k_", "r_") and one.numel() == H * n}
    r, k, v = (w[f"{name}.weight"] @ mixed[name[0]] for name in ("receptance", "key", "value"))
    decay = torch.exp(-math.exp(-0.5) * sigmoid(flat["w0"] + torch.tanh(mixed["w"] @ w["w1"]) @ w["w2"]))
    rate = sigmoid(flat["a0"] + mixed["a"] @ w["a1"] @ w["a2"])
    gate = sigmoid(mixed["g"] @ w["g1"]) @ w["g2"]
    own = v
    if first is not None:
        v = v + (first - v) * sigmoid(flat["v0"] + mixed["v"] @ w["v1"] @ w["v2"])
    removed = k * w["k_k"].reshape(-1)
    k = k * (1 + (rate - 1) * w["k_a"].reshape(-1))
    outputs, states = [], []
    for h in range(H):
        part = slice(h * n, h * n + n)
        key = removed[part] / torch.linalg.vector_norm(removed[part])
        state = S[h] @ torch.diag(decay[part]) - torch.outer(S[h] @ key, key * rate[part]) + torch.outer(v[part], k[part])
        o = state @ r[part]
        o = (o - o.mean()) / (((o - o.mean()) ** 2).mean() + eps).sqrt()
        o = o * w["ln_x.weight"][part] + w["ln_x.bias"][part]
        outputs.append(o + (r[part] * k[part] * w["r_k"][h]).sum() * v[part])
        states.append(state)
    return w["output.weight"] @ (torch.cat(outputs) * gate), torch.stack(states), own


def channel_mix(x: Tensor, p: Tensor, w: Weights) -> Tensor:
    return w["value.weight"] @ (w["key.weight"] @ (x + (p - x) * w["x_k"].reshape(-1))).clamp(min=0) ** 2


def logits(w: Weights, ids: Tensor) -> Tensor:
    """Logits [T,V] of one sequence, token by token in float64."""
    w = doubled(w)
    layers, C = depth(w, "blocks."), w["emb.weight"].shape[1]
    H, n = w["blocks.0.att.r_k"].shape
    zero = torch.zeros(C, dtype=torch.float64)
    before = [[zero, zero] for _ in range(layers)]
    states = [w.get(f"blocks.{i}.att.time_state", torch.zeros(H, n, n, dtype=torch.float64)) for i in range(layers)]
    found = []
    for token in ids.tolist():
        x, first = layer_norm(w["emb.weight"][token], w, "blocks.0.ln0"), None
        for i in range(layers):
            block = below(w, f"blocks.{i}.")
            normed = layer_norm(x, block, "ln1")
            y, states[i], own = time_mix(normed, before[i][0], states[i], below(block, "att."), first)
            first = own if i == 0 else first
            x, before[i][0] = x + y, normed
            normed = layer_norm(x, block, "ln2")
            x, before[i][1] = x + channel_mix(normed, before[i][1], below(block, "ffn.")), normed
        found.append(w["head.weight"] @ layer_norm(x, w, "ln_out"))
    return torch.stack(found)
