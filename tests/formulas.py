"""RWKV-6's layers and model, written out token by token."""

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def layer_norm(x: Tensor, w: Weights, name: str) -> Tensor:
    x = (x - x.mean()) / (((x - x.mean()) ** 2).mean() + 1e-5).sqrt()
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def time_mix(x: Tensor, p: Tensor, S: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """One token x [C] after p [C]; S [H,n,n]. The formulas of the paper, one line each."""
    dx = p - x
    hidden = torch.tanh((x + dx * w["time_maa_x"].view(-1)) @ w["time_maa_w1"])
    M = len(hidden) // 5
    mixed = {}
    for i, name in enumerate("wkvrg"):
        offset = hidden[i * M : (i + 1) * M] @ w["time_maa_w2"][i]
        mixed[name] = x + dx * (w[f"time_maa_{name}"].view(-1) + offset)
    r, k, v = w["receptance.weight"] @ mixed["r"], w["key.weight"] @ mixed["k"], w["value.weight"] @ mixed["v"]
    gate = w["gate.weight"] @ mixed["g"]
    gate = gate / (1 + torch.exp(-gate))
    decay = torch.exp(-torch.exp(w["time_decay"].view(-1) + torch.tanh(mixed["w"] @ w["time_decay_w1"]) @ w["time_decay_w2"]))
    H, n = w["time_faaaa"].shape
    outputs, states = [], []
    for h in range(H):
        c = slice(h * n, (h + 1) * n)
        kv = torch.outer(k[c], v[c])
        o = r[c] @ (S[h] + torch.diag(w["time_faaaa"][h]) @ kv)
        states.append(torch.diag(decay[c]) @ S[h] + kv)
        o = o / 8  # the norm of o / 8 with eps 1e-5
        outputs.append((o - o.mean()) / (((o - o.mean()) ** 2).mean() + 1e-5).sqrt())
    normed = torch.cat(outputs) * w["ln_x.weight"] + w["ln_x.bias"]
    return w["output.weight"] @ (normed * gate), torch.stack(states)


def channel_mix(x: Tensor, p: Tensor, w: Weights) -> Tensor:
    dx = p - x
    k = torch.clamp(w["key.weight"] @ (x + dx * w["time_maa_k"].view(-1)), min=0) ** 2
    r = 1 / (1 + torch.exp(-(w["receptance.weight"] @ (x + dx * w["time_maa_r"].view(-1)))))
    return r * (w["value.weight"] @ k)


def below(w: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): x for name, x in w.items() if name.startswith(prefix)}


def literal_logits(w: Weights, tokens: Tensor) -> Tensor:
    """One sequence [T], token by token, from the weights [T,vocabulary]."""
    H, n = w["layers.0.mixer.time_faaaa"].shape
    C, layers = H * n, 1 + max(int(name.split(".")[1]) for name in w if name.startswith("layers."))
    zero = torch.zeros(C, dtype=torch.float64)
    memory = [(zero, torch.zeros(H, n, n, dtype=torch.float64), zero) for _ in range(layers)]
    logits = []
    for token in tokens.tolist():
        x = layer_norm(w["embeddings.weight"][token], w, "embedding_norm")
        for i, (p_time, S, p_channel) in enumerate(memory):
            normed = layer_norm(x, w, f"layers.{i}.mixer_norm")
            y, S = time_mix(normed, p_time, S, below(w, f"layers.{i}.mixer."))
            x = x + y
            last = layer_norm(x, w, f"layers.{i}.channel_norm")
            x = x + channel_mix(last, p_channel, below(w, f"layers.{i}.channel."))
            memory[i] = normed, S, last
        logits.append(w["head.weight"] @ layer_norm(x, w, "norm"))
    return torch.stack(logits)


def error(x: Tensor, true: Tensor) -> float:
    return ((x.double() - true.double()).norm() / true.double().norm()).item()
