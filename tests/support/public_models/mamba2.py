"""Mamba-2: the names of transformers and those of state-spaces' own files."""

from __future__ import annotations

import torch
from torch import Tensor

from . import Draw, Weights, below, depth, doubled, rms_norm, short_convolution, silu


def config(
    *, V: int = 13, C: int = 16, H: int = 4, P: int = 8, N: int = 6, groups: int = 2, layers: int = 2, eps: float = 1e-5
) -> dict[str, object]:
    """transformers' config.json; heads of width P, states of size N."""
    return {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "vocab_size": V,
        "hidden_size": C,
        "num_heads": H,
        "head_dim": P,
        "state_size": N,
        "n_groups": groups,
        "expand": H * P // C,
        "num_hidden_layers": layers,
        "layer_norm_epsilon": eps,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "residual_in_fp32": True,
        "rms_norm": True,
        "time_step_limit": [0.0, float("inf")],
        "chunk_size": 8,
        "tie_word_embeddings": False,
    }


def draw(config: dict, seed: int = 1) -> Weights:
    """transformers' names."""
    random = Draw(seed)
    V, C, H = config["vocab_size"], config["hidden_size"], config["num_heads"]
    inner, both = H * config["head_dim"], 2 * config["n_groups"] * config["state_size"]
    w = {"backbone.embeddings.weight": random(V, C, size=1.0), "backbone.norm_f.weight": random(C, middle=1)}
    for i in range(config["num_hidden_layers"]):
        layer = {"norm.weight": random(C, middle=1), "mixer.A_log": random(H), "mixer.D": random(H, middle=1)}
        layer |= {"mixer.dt_bias": random(H, size=1.0, middle=-1), "mixer.in_proj.weight": random.matrix(2 * inner + both + H, C)}
        layer |= {"mixer.conv1d.weight": random(inner + both, 1, config["conv_kernel"]), "mixer.norm.weight": random(inner, middle=1)}
        layer |= {"mixer.out_proj.weight": random.matrix(C, inner)}
        if config["use_conv_bias"]:
            layer["mixer.conv1d.bias"] = random(inner + both)
        if config["use_bias"]:
            layer |= {"mixer.in_proj.bias": random(2 * inner + both + H), "mixer.out_proj.bias": random(C)}
        w |= {f"backbone.layers.{i}.{name}": x for name, x in layer.items()}
    if not config["tie_word_embeddings"]:
        w["lm_head.weight"] = random.matrix(V, C)
    return w


def state_spaces_names(w: Weights) -> Weights:
    """As in state-spaces/mamba2-*: the head is stored although it is the embedding."""
    renamed = {name.replace("backbone.embeddings.", "backbone.embedding."): x for name, x in w.items()}
    return renamed | {"lm_head.weight": w["backbone.embeddings.weight"].clone()}


def state_spaces_config(config: dict) -> dict[str, object]:
    layer = {"layer": "Mamba2", "headdim": config["head_dim"], "d_state": config["state_size"], "ngroups": config["n_groups"]}
    return {
        "d_model": config["hidden_size"],
        "d_intermediate": 0,
        "n_layer": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "ssm_cfg": layer,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": True,
    }


def logits(weights: Weights, config: dict, tokens: Tensor) -> Tensor:
    """transformers' names, one sequence [T]: logits [T,vocabulary]."""
    w = doubled(weights)
    layers = depth(w, "backbone.layers.")
    shape = config["num_heads"], config["state_size"], config["head_dim"]
    memory = [([], [torch.zeros(shape, dtype=torch.float64)]) for _ in range(layers)]
    head = w["backbone.embeddings.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
    result = []
    for token in tokens.tolist():
        x = w["backbone.embeddings.weight"][token]
        for i in range(layers):
            normed = rms_norm(x, w[f"backbone.layers.{i}.norm.weight"], config["layer_norm_epsilon"])
            x = x + mixer(normed, *memory[i], below(w, f"backbone.layers.{i}.mixer."), config)
        result.append(head @ rms_norm(x, w["backbone.norm_f.weight"], config["layer_norm_epsilon"]))
    return torch.stack(result)


def mixer(x: Tensor, past: list[Tensor], memory: list[Tensor], w: Weights, config: dict) -> Tensor:
    """One token x [C]; ``past`` holds the inputs of the convolution, ``memory`` the state [H,N,P]."""
    H, P, N, groups = config["num_heads"], config["head_dim"], config["state_size"], config["n_groups"]
    inner = H * P
    projected = w["in_proj.weight"] @ x + w.get("in_proj.bias", 0.0)
    z, xBC, dt = projected.split([inner, inner + 2 * groups * N, H])
    xBC = short_convolution(xBC, past, w["conv1d.weight"], w.get("conv1d.bias"))
    x, B, C = xBC.split([inner, groups * N, groups * N])
    dt = torch.log1p(torch.exp(dt + w["dt_bias"])).clamp(*config["time_step_limit"])
    (S,) = memory
    outputs, states = [], []
    for h in range(H):
        group = h // (H // groups)
        b, c, x_h = B[group * N : (group + 1) * N], C[group * N : (group + 1) * N], x[h * P : (h + 1) * P]
        states.append(torch.exp(-torch.exp(w["A_log"][h]) * dt[h]) * S[h] + torch.outer(b, x_h * dt[h]))
        outputs.append(c @ states[-1] + w["D"][h] * x_h)
    memory[0] = torch.stack(states)
    y = torch.cat(outputs) * silu(z)
    size = inner // groups  # the norm is of each group alone
    normed = [rms_norm(y[i : i + size], w["norm.weight"][i : i + size], config["layer_norm_epsilon"]) for i in range(0, inner, size)]
    return w["out_proj.weight"] @ torch.cat(normed) + w.get("out_proj.bias", 0.0)
