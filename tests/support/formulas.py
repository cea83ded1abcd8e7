"""Layers and models written out token by token in float64, from their formulas and a state_dict. They share no code with the package."""

import math
from dataclasses import asdict
from functools import partial

import torch
from passing import taken, tokens_of
from public_models import Weights, delta, layer_norm, rms_norm, rwkv5, rwkv6, rwkv7, sigmoid, silu
from torch import Tensor

from penstock.models import Config


def rwkv(x: Tensor, w: Weights, config, past: dict, formula) -> Tensor:
    H = w["ln_x.weight"].shape[0] // config.head_size
    K = w["receptance.weight"].shape[0] // H
    p, S = past.get("p", torch.zeros_like(x)), past.get("S", torch.zeros(H, K, config.head_size, dtype=x.dtype))
    y, past["S"] = formula.time_mix(x, p, S, w)
    past["p"] = x
    return y


def rwkv7_mixer(x: Tensor, w: Weights, config, past: dict) -> Tensor:
    """``past["values"]`` is shared by the layers of a model and belongs to one token."""
    H, n = w["r_k"].shape
    p, S = past.get("p", torch.zeros_like(x)), past.get("S", torch.zeros(H, n, n, dtype=x.dtype))
    values = past["values"] if "values" in past else {"value": taken(x)}
    y, past["S"], own = rwkv7.time_mix(x, p, S, w, values["value"] if "v0" in w else None, config.norm_eps)
    values.setdefault("value", own)
    past["p"] = x
    return y


def rwkv7_attention(x: Tensor, w: Weights, config, past: dict) -> Tensor:
    """RWKV-7's mixer, and attention that reads the residual stream."""
    values = past["values"] if "values" in past else {"ids": tokens_of(x).item(), **dict.fromkeys(("embedded", "residual"), taken(x))}
    given = values["residual"], below(w, "attention."), values["ids"], values["embedded"], past.setdefault("attention", {})
    return rwkv7_mixer(x, w, config, past) + rwkv7.attention(*given, config.attention_norm_eps)


def rwkv_channel(x: Tensor, w: Weights, config, past: dict, formula) -> Tensor:
    y = formula.channel_mix(x, past.get("p", torch.zeros_like(x)), w)
    past["p"] = x
    return y


def rwkv7_channel(x: Tensor, w: Weights, config, past: dict) -> Tensor:
    """``past["values"]`` has the token and its embedding, if it belongs to a model."""
    values = past["values"] if "values" in past else {"ids": tokens_of(x).item(), "embedded": taken(x)}
    given = (values["ids"], values["embedded"]) if config.embedding_rank else ()
    y = rwkv7.channel_mix(x, past.get("p", torch.zeros_like(x)), w, *given)
    past["p"] = x
    return y


def convolution(x: Tensor, w: Weights, name: str, past: dict) -> Tensor:
    """Silu of the weighted sum of the last W inputs; all past inputs are kept."""
    past.setdefault(name, []).append(x)
    W = w[f"{name}.weight"].shape[-1]
    y = w[f"{name}.bias"] if f"{name}.bias" in w else torch.zeros_like(x)
    for j in range(W):
        place = len(past[name]) - W + j
        if place >= 0:
            y = y + w[f"{name}.weight"][:, 0, j] * past[name][place]
    return silu(y)


def rotation(x: Tensor, t: int, theta: float) -> Tensor:
    """Rotate the head x [K] to position t, as complex numbers."""
    half = len(x) // 2
    angles = torch.tensor([t * theta ** (-2 * i / len(x)) for i in range(half)], dtype=torch.float64)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag])


FEATURES = {
    None: lambda x: x,
    "identity": lambda x: x,
    "elu+1": lambda x: torch.where(x > 0, x + 1, torch.exp(x)),
    "relu": lambda x: x.clamp(min=0),
    "silu": silu,
    "sigmoid": sigmoid,
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
}


def heads_mixer(x: Tensor, w: Weights, config, past: dict) -> Tensor:
    """Gated linear attention, retention and linear attention."""
    C, H = len(x), config.num_heads
    G = config.num_kv_heads or H
    K, V = round(C * config.expand_k) // H, round(C * config.expand_v) // H
    parts = {name: w[f"{name}_proj.weight"] @ x for name in "qkv"}
    if config.conv_size:
        parts = {name: convolution(part, w, f"{name}_conv1d", past) for name, part in parts.items()}
    phi, t = FEATURES[config.feature_map], past.get("t", 0)
    q = [phi(one) for one in parts["q"].split(K)]
    k = [phi(one) for one in parts["k"].split(K)]
    v = list(parts["v"].split(V))
    if config.kind == "retention":
        q, k = ([rotation(one, t, config.rope_theta) for one in heads] for heads in (q, k))
    if config.kind == "gla":
        gates = w["gk_proj.1.weight"] @ (w["gk_proj.0.weight"] @ x) + w["gk_proj.1.bias"]
        g = -torch.log(1 + torch.exp(-gates)) / config.gate_logit_normalizer
        g = list((g if config.clamp_min is None else g.clamp(min=config.clamp_min)).split(K))
    outputs = []
    for h in range(H):
        served = h // (H // G)
        decay = {
            "gla": lambda: torch.exp(g[served]),  # noqa: B023
            "retention": lambda: torch.full((K,), 1 - 2.0 ** (-5 - h), dtype=torch.float64),  # noqa: B023
            "linear_attention": lambda: torch.ones(K, dtype=torch.float64),
        }[config.kind]()
        S = past.get(("S", h), torch.zeros(K, V, dtype=torch.float64))
        past["S", h] = torch.diag(decay) @ S + torch.outer(k[served], v[served])
        o = q[h] @ past["S", h] * K**-0.5
        if getattr(config, "normalize", False):
            past["z", h] = past.get(("z", h), torch.zeros(K, dtype=torch.float64)) + k[served]
            o = q[h] @ past["S", h] / (q[h] @ past["z", h])
        weight = w.get("norm.weight", torch.ones(V, dtype=torch.float64))
        outputs.append(rms_norm(o, weight, config.norm_eps) if config.use_output_norm else o)
    past["t"] = t + 1
    o = torch.cat(outputs)
    return w["o_proj.weight"] @ (o * silu(w["g_proj.weight"] @ x) if config.use_output_gate else o)


def mamba2(x: Tensor, w: Weights, config, past: dict) -> Tensor:
    H, K, V, G = config.num_heads, config.state_size, config.head_dim, config.n_groups
    bias = w.get("in_proj.bias", 0)
    z, mixed, dt = (w["in_proj.weight"] @ x + bias).split([H * V, H * V + 2 * G * K, H])
    x, B, C = convolution(mixed, w, "conv1d", past).split([H * V, G * K, G * K])
    dt = torch.log(1 + torch.exp(dt + w["dt_bias"])).clamp(*config.time_step_limit)
    outputs = []
    for h in range(H):
        group, head = h // (H // G), slice(h * V, h * V + V)
        S = past.get(("S", h), torch.zeros(K, V, dtype=torch.float64))
        past["S", h] = torch.exp(-torch.exp(w["A_log"][h]) * dt[h]) * S + torch.outer(B[group * K : group * K + K], dt[h] * x[head])
        outputs.append(C[group * K : group * K + K] @ past["S", h] + w["D"][h] * x[head])
    y = torch.cat(outputs) * silu(z)
    normed = torch.cat([rms_norm(part, torch.ones(()), config.norm_eps) for part in y.split(H * V // G)]) * w["norm.weight"]
    return w["out_proj.weight"] @ normed + w.get("out_proj.bias", 0)


def delta_mixer(x: Tensor, w: Weights, config, past: dict) -> Tensor:
    """DeltaNet, gated DeltaNet and Kimi delta attention."""
    sizes = asdict(config) | {"model_type": config.kind, "hidden_size": len(x)}
    gate = {"delta_net": "silu", "kda": "sigmoid"}.get(config.kind, sizes.get("gate_activation"))
    if sizes.get("qk_activation") == "elu+1":
        sizes["qk_activation"] = "elu"
    return delta.mixer(x, past, w | {"o_norm.weight": w["norm.weight"]}, sizes, delta.heads(sizes), gate)


def softmax_attention(x: Tensor, w: Weights, config, past: dict) -> Tensor:
    H, G = config.num_heads, config.num_kv_heads or config.num_heads
    D, t = config.head_dim or len(x) // H, len(past.setdefault("k", []))
    q, k, v = ((w[f"{name}_proj.weight"] @ x + w.get(f"{name}_proj.bias", 0)).split(D) for name in "qkv")
    if config.qk_norm:
        q = [rms_norm(one, w["q_norm.weight"], config.norm_eps) for one in q]
        k = [rms_norm(one, w["k_norm.weight"], config.norm_eps) for one in k]
    if config.rope_theta is not None:
        q, k = ([rotation(one, t, config.rope_theta) for one in heads] for heads in (q, k))
    past["k"].append(k)
    past.setdefault("v", []).append(v)
    first = 0 if config.window_size is None else max(0, t + 1 - config.window_size)
    outputs = []
    for h in range(H):
        served = h // (H // G)
        weights = torch.stack([torch.exp(q[h] @ past["k"][j][served] / math.sqrt(D)) for j in range(first, t + 1)])
        values = torch.stack([past["v"][j][served] for j in range(first, t + 1)])
        outputs.append(weights / weights.sum() @ values)
    return w["o_proj.weight"] @ torch.cat(outputs)


def swiglu(x: Tensor, w: Weights, config, past: dict) -> Tensor:
    return w["down_proj.weight"] @ (silu(w["gate_proj.weight"] @ x) * (w["up_proj.weight"] @ x))


def mean_of_inputs(x: Tensor, w: Weights, config, past: dict) -> Tensor:
    past.setdefault("x", []).append(x)
    return w["output.weight"] @ (sum(past["x"][-config.size :]) / config.size)


MIXERS = {
    "rwkv6": partial(rwkv, formula=rwkv6),
    "rwkv5": partial(rwkv, formula=rwkv5),
    "rwkv7": rwkv7_mixer,
    "rwkv7_attention": rwkv7_attention,
    "rwkv7_channel": rwkv7_channel,
    "rwkv6_channel": partial(rwkv_channel, formula=rwkv6),
    "rwkv5_channel": partial(rwkv_channel, formula=rwkv5),
    "gla": heads_mixer,
    "retention": heads_mixer,
    "linear_attention": heads_mixer,
    "mamba2": mamba2,
    "delta_net": delta_mixer,
    "gated_deltanet": delta_mixer,
    "kda": delta_mixer,
    "softmax_attention": softmax_attention,
    "swiglu": swiglu,
    "mean_of_inputs": mean_of_inputs,
}
"""For each kind: (x [C], weights, config, past) -> y [C]; ``past`` holds what it keeps of earlier tokens, empty at first."""


def below(w: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): x for name, x in w.items() if name.startswith(prefix)}


def literal_outputs(config, w: Weights, x: Tensor) -> Tensor:
    """One mixer over one sequence x [T,C]: [T,C]."""
    past: dict = {}
    w = {name: one.double() for name, one in w.items()}
    return torch.stack([MIXERS[config.kind](one, w, config, past) for one in x.double()])


def literal_logits(config: Config, w: Weights, ids: Tensor) -> Tensor:
    """A model over one sequence [T], token by token: [T,V]."""
    w = {name: x.double() for name, x in w.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        if config.norm == "layer_norm":
            return layer_norm(x, w, name, config.norm_eps)
        return rms_norm(x, w[f"{name}.weight"], config.norm_eps)

    pasts: dict = {}
    logits = []
    for token in ids.tolist():
        x, values = w["embeddings.weight"][token], {}
        if config.embedding_norm:
            x = norm(x, "embedding_norm")
        values |= {"ids": token, "embedded": x}
        for i, (mixer, channel) in enumerate(zip(config.mixers, config.channels)):
            for part, one in (("mixer", mixer), ("channel", channel)):
                if one is not None:
                    normed = norm(x, f"layers.{i}.{part}_norm")
                    past = pasts.setdefault((i, part), {})
                    past["values"] = values
                    values["residual"] = x
                    x = x + MIXERS[one.kind](normed, below(w, f"layers.{i}.{part}."), one, past)
        logits.append(w["head.weight"] @ norm(x, "norm"))
    return torch.stack(logits)


def error(x: Tensor, true: Tensor) -> float:
    return ((x.double() - true.double()).norm() / true.double().norm()).item()
