"""Gated linear attention: fla's names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import Draw, Weights, below, depth, doubled, rms_norm, short_convolution, sigmoid, silu


def config(**changes: object) -> dict[str, object]:
    """fla's config.json with few channels."""
    return {
        "model_type": "gla",
        "architectures": ["GLAForCausalLM"],
        "attn": None,
        "attn_mode": "chunk",
        "clamp_min": None,
        "conv_size": 4,
        "elementwise_affine": True,
        "expand_k": 0.5,
        "expand_v": 1,
        "feature_map": None,
        "fuse_norm": True,
        "hidden_act": "swish",
        "hidden_ratio": 4,
        "hidden_size": 24,
        "intermediate_size": 40,
        "norm_eps": 1e-6,
        "num_heads": 2,
        "num_hidden_layers": 2,
        "num_kv_heads": None,
        "tie_word_embeddings": False,
        "use_gk": True,
        "use_gv": False,
        "use_output_gate": True,
        "use_short_conv": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": 13,
    } | changes


def draw(config: dict, seed: int = 1, rank: int = 16) -> Weights:
    return drawn(config, seed, lambda random: mixer_weights(random, config, rank))


def drawn(config: dict, seed: int, mixer_weights: Callable[[Draw], Weights]) -> Weights:
    """Blocks of a mixer, or of softmax attention, and a SwiGLU MLP."""
    random = Draw(seed)
    V, C, F = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    w = {"model.embeddings.weight": random(V, C, size=1.0), "model.norm.weight": random(C, middle=1)}
    for i in range(config["num_hidden_layers"]):
        layer = {"attn_norm.weight": random(C, middle=1), "mlp_norm.weight": random(C, middle=1)}
        layer |= {f"mlp.{one}_proj.weight": random.matrix(F, C) for one in ("gate", "up")} | {"mlp.down_proj.weight": random.matrix(C, F)}
        spec = softmax_spec(config, i)
        mixer = softmax_weights(random, C, spec) if spec else mixer_weights(random)
        layer |= {f"attn.{name}": x for name, x in mixer.items()}
        w |= {f"model.layers.{i}.{name}": x for name, x in layer.items()}
    if not config["tie_word_embeddings"]:
        w["lm_head.weight"] = random.matrix(V, C)
    return w


def softmax_weights(random: Draw, C: int, spec: dict) -> Weights:
    """Weights of a layer of softmax attention."""
    width = C // spec["num_heads"] * spec.get("num_kv_heads", spec["num_heads"])
    w = {"o_proj.weight": random.matrix(C, C)}
    for one, rows in {"q": C, "k": width, "v": width}.items():
        w[f"{one}_proj.weight"] = random.matrix(rows, C)
        if spec.get("qkv_bias"):
            w[f"{one}_proj.bias"] = random(rows)
    return w


def mixer_weights(random: Draw, config: dict, rank: int) -> Weights:
    C, H = config["hidden_size"], config["num_heads"]
    keys, values, shared = int(C * config["expand_k"]), int(C * config["expand_v"]), H // (config["num_kv_heads"] or H)
    w = {"q_proj.weight": random.matrix(keys, C), "k_proj.weight": random.matrix(keys // shared, C)}
    w |= {"v_proj.weight": random.matrix(values // shared, C), "o_proj.weight": random.matrix(C, values)}
    if config["model_type"] == "gla":
        w |= {"gk_proj.0.weight": random.matrix(rank, C), "gk_proj.1.weight": random(keys // shared, rank, size=1.0)}
        w |= {"gk_proj.1.bias": random(keys // shared)}
    if config["use_short_conv"]:
        width = config["conv_size"]
        w |= {"q_conv1d.weight": random(keys, 1, width), "k_conv1d.weight": random(keys // shared, 1, width)}
        w |= {"v_conv1d.weight": random(values // shared, 1, width)}
    fused = config["use_output_gate"] and config["fuse_norm"]
    if config["use_output_gate"]:
        w["g_proj.weight"] = random.matrix(values, C)
    if config["elementwise_affine"]:
        w["g_norm_swish_gate.weight" if fused else "g_norm.weight"] = random(values // H, middle=1)
    return w


def logits(weights: Weights, config: dict, tokens: Tensor) -> Tensor:
    """One sequence [T]: logits [T,vocabulary]."""
    return model(weights, config, tokens, mixer)


def model(weights: Weights, config: dict, tokens: Tensor, mixer, remembering=None) -> Tensor:
    """Blocks of a mixer and a SwiGLU MLP. ``remembering`` makes the memory of a layer."""
    w, eps = doubled(weights), config["norm_eps"]
    layers = depth(w, "model.layers.")
    memory = [(remembering or Memory)(config) for _ in range(layers)]
    head = w["model.embeddings.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
    result = []
    for token in tokens.tolist():
        x = w["model.embeddings.weight"][token]
        for i in range(layers):
            layer = below(w, f"model.layers.{i}.")
            spec = softmax_spec(config, i)
            normed = rms_norm(x, layer["attn_norm.weight"], eps)
            if spec:
                x = x + softmax_attention(normed, memory[i], below(layer, "attn."), spec)
            else:
                x = x + mixer(normed, memory[i], below(layer, "attn."), config)
            normed = rms_norm(x, layer["mlp_norm.weight"], eps)
            hidden = silu(layer["mlp.gate_proj.weight"] @ normed) * (layer["mlp.up_proj.weight"] @ normed)
            x = x + layer["mlp.down_proj.weight"] @ hidden
        result.append(head @ rms_norm(x, w["model.norm.weight"], eps))
    return torch.stack(result)


class Memory:
    """What a layer keeps of a sequence: the state [H,K,V], the inputs of convolutions, the number of tokens."""

    def __init__(self, config: dict) -> None:
        H, C = config["num_heads"], config["hidden_size"]
        self.S = torch.zeros(H, int(C * config["expand_k"]) // H, int(C * config["expand_v"]) // H, dtype=torch.float64)
        self.q, self.k, self.v = [], [], []
        self.position = 0
        self.keys, self.values = [], []


def softmax_spec(config: dict, layer: int) -> dict | None:
    """What config.json says about a layer of softmax attention."""
    specs = config["attn"] or []
    return next((spec for spec in ([specs] if isinstance(specs, dict) else specs) if layer in spec["layers"]), None)


def rotated(x: Tensor, position: int, base: float = 10000.0) -> Tensor:
    """Heads x [..,K]: channel i turns with channel i + K / 2."""
    half = x.shape[-1] // 2
    angles = position * base ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


def softmax_attention(x: Tensor, memory: Memory, w: Weights, spec: dict) -> Tensor:
    """One token x [C]; memory holds keys and values [G,D] of all tokens."""
    q, k, v = (w[f"{one}_proj.weight"] @ x + w.get(f"{one}_proj.bias", 0.0) for one in "qkv")
    H = spec["num_heads"]
    D = len(q) // H
    base = spec.get("rope_theta", 10000.0)
    memory.keys.append(rotated(k.view(-1, D), memory.position, base))
    memory.values.append(v.view(-1, D))
    q = rotated(q.view(H, D), memory.position, base)
    memory.position += 1
    window = slice(-spec["window_size"], None) if spec.get("window_size") else slice(None)
    outputs = []
    for h in range(H):
        one = h * len(memory.keys[0]) // H
        scores = torch.stack([q[h] @ key[one] for key in memory.keys[window]]) * D**-0.5
        outputs.append(sum(p * value[one] for p, value in zip(torch.softmax(scores, 0), memory.values[window])))
    return w["o_proj.weight"] @ torch.cat(outputs)


def feature_map(name: str | None, x: Tensor) -> Tensor:
    return {None: x, "relu": x.clamp(min=0), "swish": silu(x), "silu": silu(x), "sigmoid": sigmoid(x)}[name]


def project(x: Tensor, memory: Memory, w: Weights, config: dict) -> tuple[Tensor, Tensor, Tensor]:
    """q [H,K], k and v of each key head."""
    q, k, v = w["q_proj.weight"] @ x, w["k_proj.weight"] @ x, w["v_proj.weight"] @ x
    if config["use_short_conv"]:
        q = short_convolution(q, memory.q, w["q_conv1d.weight"])
        k = short_convolution(k, memory.k, w["k_conv1d.weight"])
        v = short_convolution(v, memory.v, w["v_conv1d.weight"])
    _, K, V = memory.S.shape
    return feature_map(config["feature_map"], q).view(-1, K), feature_map(config["feature_map"], k).view(-1, K), v.view(-1, V)


def output(o: Tensor, x: Tensor, w: Weights, config: dict) -> Tensor:
    """Heads o [H,V] of token x: norm, gate, projection."""
    weight = w.get("g_norm_swish_gate.weight", w.get("g_norm.weight", torch.ones_like(o[0])))
    normed = torch.cat([rms_norm(one, weight, config["norm_eps"]) for one in o])
    if config["use_output_gate"]:
        normed = normed * silu(w["g_proj.weight"] @ x)
    return w["o_proj.weight"] @ normed


def mixer(x: Tensor, memory: Memory, w: Weights, config: dict) -> Tensor:
    """One token x [C]."""
    q, k, v = project(x, memory, w, config)
    gate = w["gk_proj.1.weight"] @ (w["gk_proj.0.weight"] @ x) + w["gk_proj.1.bias"]
    decay = -torch.log1p(torch.exp(-gate)) / 16
    if config["clamp_min"] is not None:
        decay = decay.clamp(min=config["clamp_min"])
    H, K, _ = memory.S.shape
    decay, shared = decay.view(-1, K), H // len(k)
    outputs, states = [], []
    for h in range(H):
        one = h // shared
        states.append(torch.diag(torch.exp(decay[one])) @ memory.S[h] + torch.outer(k[one], v[one]))
        outputs.append(K**-0.5 * q[h] @ states[-1])
    memory.S = torch.stack(states)
    return output(torch.stack(outputs), x, w, config)
