"""DeltaNet, gated DeltaNet and Kimi delta attention: fla's names. Blocks are those of gla.py."""

from __future__ import annotations

import torch
from torch import Tensor

from . import Draw, Weights, gla, rms_norm, sigmoid, silu

COMMON = {
    "attn": None,
    "attn_mode": "chunk",
    "allow_neg_eigval": False,
    "conv_size": 4,
    "fuse_norm": True,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "hidden_size": 24,
    "intermediate_size": 40,
    "norm_eps": 1e-6,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "use_short_conv": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": 13,
}
OWN = {
    "delta_net": {
        "architectures": ["DeltaNetForCausalLM"], "num_heads": 2, "expand_k": 1.0, "expand_v": 1.0, "use_beta": True, "use_gate": False,
        "use_output_norm": True, "qk_activation": "silu", "qk_norm": "l2",
    },
    "gated_deltanet": {
        "architectures": ["GatedDeltaNetForCausalLM"], "num_heads": 2, "head_dim": 6, "num_v_heads": None, "expand_v": 2.0,
        "use_gate": True, "output_gate_activation": "swish",
    },
    "kda": {
        "architectures": ["KDAForCausalLM"], "num_heads": 2, "head_dim": 6, "num_v_heads": None, "expand_v": 1.0, "safe_gate": False,
        "lower_bound": None,
    },
}  # fmt: skip


def config(kind: str, **changes: object) -> dict[str, object]:
    """fla's config.json with few channels."""
    return {"model_type": kind, **COMMON, **OWN[kind], **changes}


def heads(config: dict) -> tuple[int, int, int, int]:
    """Heads of q and k, heads of v, and their sizes."""
    G = config["num_heads"]
    if config["model_type"] == "delta_net":
        return G, G, int(config["hidden_size"] * config["expand_k"]) // G, int(config["hidden_size"] * config["expand_v"]) // G
    return G, config["num_v_heads"] or G, config["head_dim"], int(config["head_dim"] * config["expand_v"])


def draw(config: dict, seed: int = 1) -> Weights:
    return gla.drawn(config, seed, lambda random: mixer_weights(random, config))


def mixer_weights(random: Draw, config: dict) -> Weights:
    (G, H, K, V), C, kind = heads(config), config["hidden_size"], config["model_type"]
    sizes = {"q": G * K, "k": G * K, "v": H * V}
    w = {f"{one}_proj.weight": random.matrix(size, C) for one, size in sizes.items()} | {"o_proj.weight": random.matrix(C, H * V)}
    if config["use_short_conv"]:
        w |= {f"{one}_conv1d.weight": random(size, 1, config["conv_size"]) for one, size in sizes.items()}
    w["o_norm.weight"] = random(V, middle=1)
    if config.get("use_beta", True):
        w["b_proj.weight"] = random.matrix(H, C)
    if kind == "kda":
        w |= {"f_proj.0.weight": random.matrix(V, C), "f_proj.1.weight": random.matrix(H * K, V), "g_proj.1.bias": random(H * V)}
        w |= {"g_proj.0.weight": random.matrix(V, C), "g_proj.1.weight": random.matrix(H * V, V)}
        return w | {"A_log": random(H), "dt_bias": random(H * K)}
    if config["use_gate"]:
        w["g_proj.weight"] = random.matrix(H * V, C)
    return w | ({"a_proj.weight": random.matrix(H, C), "A_log": random(H), "dt_bias": random(H)} if kind == "gated_deltanet" else {})


class Memory(gla.Memory):
    """What a layer keeps of a sequence."""

    def __init__(self, config: dict) -> None:
        self.past: dict = {}
        self.position, self.keys, self.values = 0, [], []


def logits(weights: Weights, config: dict, tokens: Tensor) -> Tensor:
    """One sequence [T]: logits [T,vocabulary]."""
    gate = {"delta_net": "silu", "kda": "sigmoid"}.get(config["model_type"], config.get("output_gate_activation"))
    return gla.model(weights, config, tokens, lambda x, memory, w, config: mixer(x, memory.past, w, config, heads(config), gate), Memory)


def mixer(x: Tensor, past: dict, w: Weights, config: dict, heads: tuple[int, int, int, int], gate: str) -> Tensor:
    """One token x [C]. ``past`` holds the inputs of convolutions and the state [K,V] of each head, empty at first."""
    G, H, K, V = heads
    kind, activation = config["model_type"], config.get("qk_activation", "silu")
    q, k = (feature(convolved(x, one, past, w, activation == "silu"), activation).split(K) for one in "qk")
    v = convolved(x, "v", past, w, True).split(V)
    beta = sigmoid(w["b_proj.weight"] @ x) if "b_proj.weight" in w else torch.ones(H, dtype=x.dtype)
    beta = beta * 2 if config["allow_neg_eigval"] else beta
    outputs = []
    for h in range(H):
        one = h // (H // G)
        query, key = (normed(head[one], config.get("qk_norm", "l2")) for head in (q, k))
        S = torch.diag(decays(x, w, config, h, K)) @ past.get(("S", h), torch.zeros(K, V, dtype=x.dtype))
        past["S", h] = S + beta[h] * torch.outer(key, v[h] - key @ S)
        outputs.append(rms_norm(K**-0.5 * query @ past["S", h], w["o_norm.weight"], config["norm_eps"]))
    o = torch.cat(outputs)
    if kind == "kda":
        z = w["g_proj.1.weight"] @ (w["g_proj.0.weight"] @ x) + w["g_proj.1.bias"]
    else:
        z = w["g_proj.weight"] @ x if config["use_gate"] else None
    o = o if z is None else o * (sigmoid(z) if gate == "sigmoid" else silu(z))
    return w["o_proj.weight"] @ o


def convolved(x: Tensor, name: str, past: dict, w: Weights, activated: bool) -> Tensor:
    """One of q, k and v of token x: a linear map, a causal convolution and silu."""
    y = w[f"{name}_proj.weight"] @ x
    if f"{name}_conv1d.weight" in w:
        weight = w[f"{name}_conv1d.weight"][:, 0]
        past[name] = [*past.get(name, []), y][-weight.shape[1] :]
        y = sum(weight[:, -1 - back] * one for back, one in enumerate(reversed(past[name])))
        y = y + w.get(f"{name}_conv1d.bias", 0.0)
    return silu(y) if activated else y


def feature(x: Tensor, activation: str) -> Tensor:
    """The activation of q and k, but for silu, which is that of their convolution."""
    elu = torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))
    return {"silu": x, "identity": x, "relu": x.clamp(min=0), "elu": elu}[activation]


def normed(x: Tensor, norm: str) -> Tensor:
    return x / ((x**2).sum() + 1e-6).sqrt() if norm == "l2" else x / x.sum()


def decays(x: Tensor, w: Weights, config: dict, h: int, K: int) -> Tensor:
    """The factors [K] by which head h decays."""
    if config["model_type"] == "delta_net":
        return torch.ones(K, dtype=x.dtype)
    rate = torch.exp(w["A_log"][h])
    if config["model_type"] == "gated_deltanet":
        return torch.exp(-rate * torch.log(1 + torch.exp(w["a_proj.weight"][h] @ x + w["dt_bias"][h]))).expand(K)
    own = slice(h * K, h * K + K)
    raw = w["f_proj.1.weight"][own] @ (w["f_proj.0.weight"] @ x) + w["dt_bias"][own]
    if config["lower_bound"] is not None:
        return torch.exp(config["lower_bound"] * sigmoid(rate * raw))
    return torch.exp(-rate * torch.log(1 + torch.exp(raw)))
