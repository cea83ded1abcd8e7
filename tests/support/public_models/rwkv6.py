"""RWKV-6: BlinkDL's names, those of the Hugging Face remote code, and fla's."""

from __future__ import annotations

import torch
from torch import Tensor

from . import Draw, Weights, below, depth, doubled, layer_norm, sigmoid, silu


def draw(
    seed: int = 1, *, V: int = 13, C: int = 24, n: int = 8, F: int = 40, M: int = 5, D: int = 6, layers: int = 2, dtype=torch.float32
) -> Weights:
    """BlinkDL's names and shapes."""
    random = Draw(seed, dtype)
    H = C // n
    w = {"emb.weight": random(V, C, size=1.0)}
    for i in range(layers):
        for norm in ["ln0"] * (i == 0) + ["ln1", "ln2"]:
            w |= {f"blocks.{i}.{norm}.weight": random(C, middle=1), f"blocks.{i}.{norm}.bias": random(C)}
        att = {f"time_maa_{one}": random(1, 1, C, middle=0.5) for one in "xwkvrg"}
        att |= {"time_maa_w1": random(C, 5 * M), "time_maa_w2": random(5, M, C), "time_decay": random(1, 1, C, size=1.0, middle=-1)}
        att |= {"time_decay_w1": random(C, D), "time_decay_w2": random(D, C), "time_faaaa": random(H, n)}
        att |= {f"{one}.weight": random.matrix(C, C) for one in ("receptance", "key", "value", "output", "gate")}
        att |= {"ln_x.weight": random(C, middle=1), "ln_x.bias": random(C)}
        ffn = {"time_maa_k": random(1, 1, C, middle=0.5), "time_maa_r": random(1, 1, C, middle=0.5)}
        ffn |= {"key.weight": random.matrix(F, C), "receptance.weight": random.matrix(C, C), "value.weight": random.matrix(C, F)}
        w |= {f"blocks.{i}.att.{name}": x for name, x in att.items()} | {f"blocks.{i}.ffn.{name}": x for name, x in ffn.items()}
    w |= {"ln_out.weight": random(C, middle=1), "ln_out.bias": random(C), "head.weight": random.matrix(V, C)}
    return w


def with_time_state(w: Weights, seed: int = 3) -> Weights:
    """A tuned initial state [H,n,n], V x K, in every block."""
    random = Draw(seed)
    states = {}
    for i in range(depth(w, "blocks.")):
        H, n = w[f"blocks.{i}.att.time_faaaa"].shape
        states[f"blocks.{i}.att.time_state"] = random(H, n, n, size=1.0)
    return w | states


def hf_names(w: Weights) -> Weights:
    """As in RWKV/rwkv-6-world-*."""
    renamed = {}
    for name, x in w.items():
        name = name.replace("blocks.0.ln0.", "blocks.0.pre_ln.").replace("emb.", "embeddings.")
        name = name.replace(".att.", ".attention.").replace(".ffn.", ".feed_forward.")
        renamed[name if name == "head.weight" else f"rwkv.{name}"] = x
    return renamed


def hf_config(w: Weights) -> dict[str, object]:
    """With the wrong number of heads and without the width of the channel mix, as published."""
    V, C = w["emb.weight"].shape
    n = w["blocks.0.att.time_faaaa"].shape[1]
    return {
        "model_type": "rwkv6",
        "architectures": ["Rwkv6ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_rwkv6.Rwkv6Config", "AutoModelForCausalLM": "modeling_rwkv6.Rwkv6ForCausalLM"},
        "attention_hidden_size": C,
        "head_size": n,
        "head_size_divisor": 8,
        "hidden_size": C,
        "intermediate_size": None,
        "layer_norm_epsilon": 1e-05,
        "num_attention_heads": 64,
        "num_hidden_layers": depth(w, "blocks."),
        "rescale_every": 6,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "vocab_size": V,
    }


def fla_names(w: Weights) -> Weights:
    """As in fla-hub/rwkv6-*, converted from BlinkDL's: r, w, k, v, g where BlinkDL has w, k, v, r, g."""
    order = ["wkvrg".index(one) for one in "rwkvg"]
    names = {"emb.weight": "model.embeddings.weight", "head.weight": "lm_head.weight"}
    names |= {f"ln_out.{part}": f"model.norm.{part}" for part in ("weight", "bias")}
    converted = {new: w[old] for old, new in names.items()}
    for i in range(depth(w, "blocks.")):
        block, layer = below(w, f"blocks.{i}."), {}
        for old, new in {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att.ln_x": "attn.g_norm"}.items():
            layer |= {f"{new}.{part}": block[f"{old}.{part}"] for part in ("weight", "bias") if f"{old}.{part}" in block}
        w1, w2 = block["att.time_maa_w1"], block["att.time_maa_w2"]
        M, C = w2.shape[1:]
        layer["attn.x_proj.0.mu"] = block["att.time_maa_x"].reshape(C)
        layer["attn.x_proj.0.linear.weight"] = torch.cat([w1[:, j * M : (j + 1) * M].T for j in order])
        layer["attn.x_proj.2.weight"] = torch.cat([w2[j].T for j in order], 1)
        layer["attn.x_bias"] = torch.stack([block[f"att.time_maa_{one}"].reshape(C) for one in "rwkvg"])
        for old, new in {"receptance": "r", "key": "k", "value": "v", "gate": "g"}.items():
            layer[f"attn.{new}_proj.linear.weight"] = block[f"att.{old}.weight"]
        layer["attn.w_proj.linear.lora.0.weight"] = block["att.time_decay_w1"].T
        layer["attn.w_proj.linear.lora.2.weight"] = block["att.time_decay_w2"].T
        layer["attn.w_proj.linear.lora.2.bias"] = block["att.time_decay"].reshape(-1)
        layer["attn.bonus"] = block["att.time_faaaa"]
        layer["attn.o_proj.weight"] = block["att.output.weight"]
        for old, new in {"k": "key", "r": "receptance"}.items():
            layer[f"ffn.{new}.mu"] = block[f"ffn.time_maa_{old}"].reshape(C)
            layer[f"ffn.{new}.linear.weight"] = block[f"ffn.{new}.weight"]
        layer["ffn.value.weight"] = block["ffn.value.weight"]
        converted |= {f"model.layers.{i}.{name}": x for name, x in layer.items()}
    return converted


def draw_fla(
    seed: int = 1, *, V: int = 13, C: int = 24, H: int = 3, K: int = 4, value: int = 8, F: int = 64, M: int = 5, D: int = 6, layers: int = 2
) -> Weights:
    """fla's names and shapes for heads whose K differs from V, as fla trains them."""
    random = Draw(seed)
    A, B = H * K, H * value
    w = {"model.embeddings.weight": random(V, C, size=1.0), "lm_head.weight": random.matrix(V, C)}
    w |= {"model.norm.weight": random(C, middle=1), "model.norm.bias": random(C)}
    for i in range(layers):
        layer = {}
        for norm in ["pre_norm"] * (i == 0) + ["attn_norm", "ffn_norm"]:
            layer |= {f"{norm}.weight": random(C, middle=1), f"{norm}.bias": random(C)}
        layer |= {"attn.x_proj.0.mu": random(C, middle=0.5), "attn.x_proj.0.linear.weight": random(5 * M, C)}
        layer |= {"attn.x_proj.2.weight": random(C, 5 * M), "attn.x_bias": random(5, C, middle=0.5)}
        layer |= {f"attn.{one}_proj.linear.weight": random.matrix(A, C) for one in "rk"}
        layer |= {f"attn.{one}_proj.linear.weight": random.matrix(B, C) for one in "vg"}
        layer |= {"attn.w_proj.linear.lora.0.weight": random(D, C), "attn.w_proj.linear.lora.2.weight": random(A, D)}
        layer |= {"attn.w_proj.linear.lora.2.bias": random(A, size=1.0, middle=-1), "attn.bonus": random(H, K)}
        layer |= {"attn.g_norm.weight": random(B, middle=1), "attn.g_norm.bias": random(B), "attn.o_proj.weight": random.matrix(C, B)}
        layer |= {"ffn.key.mu": random(C, middle=0.5), "ffn.receptance.mu": random(C, middle=0.5)}
        layer |= {"ffn.key.linear.weight": random.matrix(F, C), "ffn.receptance.linear.weight": random.matrix(C, C)}
        layer |= {"ffn.value.weight": random.matrix(C, F)}
        w |= {f"model.layers.{i}.{name}": x for name, x in layer.items()}
    return w


def fla_config(w: Weights, norm_eps: float = 1e-5) -> dict[str, object]:
    V, C = w["model.embeddings.weight"].shape
    H, K = w["model.layers.0.attn.bonus"].shape
    return {
        "model_type": "rwkv6",
        "architectures": ["RWKV6ForCausalLM"],
        "attn": None,
        "attn_mode": "chunk",
        "hidden_size": C,
        "expand_k": H * K / C,
        "expand_v": len(w["model.layers.0.attn.g_norm.weight"]) / C,
        "gate_low_rank_dim": len(w["model.layers.0.attn.w_proj.linear.lora.0.weight"]),
        "hidden_act": "sqrelu",
        "hidden_ratio": 3.5,
        "intermediate_size": None,
        "norm_bias": True,
        "norm_eps": norm_eps,
        "norm_first": True,
        "num_heads": H,
        "num_hidden_layers": depth(w, "model.layers."),
        "proj_low_rank_dim": len(w["model.layers.0.attn.x_proj.0.linear.weight"]) // 5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": V,
    }


def logits(weights: Weights, tokens: Tensor) -> Tensor:
    """BlinkDL's names, one sequence [T]: logits [T,vocabulary]."""
    w = doubled(weights)
    H, n = w["blocks.0.att.time_faaaa"].shape
    zero = torch.zeros(H * n, dtype=torch.float64)
    memory = []
    for i in range(depth(w, "blocks.")):
        tuned = w.get(f"blocks.{i}.att.time_state")  # V x K
        S = torch.zeros(H, n, n, dtype=torch.float64) if tuned is None else torch.stack([one.T for one in tuned])
        memory.append((zero, S, zero))
    return evaluated(w, tokens, memory, time_mix, channel_mix)


def evaluated(w: Weights, tokens: Tensor, memory: list, time_mix, channel_mix) -> Tensor:
    """Logits of RWKV-5 and RWKV-6 from the two mixes of a block; ``memory``: the states of each block before the first token."""
    result = []
    for token in tokens.tolist():
        x = layer_norm(w["emb.weight"][token], w, "blocks.0.ln0")
        for i, (p_time, S, p_channel) in enumerate(memory):
            normed = layer_norm(x, w, f"blocks.{i}.ln1")
            y, S = time_mix(normed, p_time, S, below(w, f"blocks.{i}.att."))
            x = x + y
            last = layer_norm(x, w, f"blocks.{i}.ln2")
            x = x + channel_mix(last, p_channel, below(w, f"blocks.{i}.ffn."))
            memory[i] = normed, S, last
        result.append(w["head.weight"] @ layer_norm(x, w, "ln_out"))
    return torch.stack(result)


def time_mix(x: Tensor, p: Tensor, S: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """One token x [C] after p [C]; S [H,K,V]."""
    dx = p - x
    hidden = torch.tanh((x + dx * w["time_maa_x"].view(-1)) @ w["time_maa_w1"])
    M = len(hidden) // 5
    mixed = {}
    for j, name in enumerate("wkvrg"):
        offset = hidden[j * M : (j + 1) * M] @ w["time_maa_w2"][j]
        mixed[name] = x + dx * (w[f"time_maa_{name}"].view(-1) + offset)
    r, k, v = w["receptance.weight"] @ mixed["r"], w["key.weight"] @ mixed["k"], w["value.weight"] @ mixed["v"]
    decay = torch.exp(-torch.exp(w["time_decay"].view(-1) + torch.tanh(mixed["w"] @ w["time_decay_w1"]) @ w["time_decay_w2"]))
    o, S = recurrence(r, k, v, decay, w["time_faaaa"], S)
    normed = group_norm(o / 8, 1e-5) * w["ln_x.weight"] + w["ln_x.bias"]
    return w["output.weight"] @ (normed * silu(w["gate.weight"] @ mixed["g"])), S


def recurrence(r: Tensor, k: Tensor, v: Tensor, decay: Tensor, u: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """r, k and decay [H*K], v [H*V], u [H,K], S [H,K,V]: o [H,V] and the next S."""
    outputs, states = [], []
    for h, (K, V) in enumerate([S.shape[1:]] * len(S)):
        keys, values = slice(h * K, (h + 1) * K), slice(h * V, (h + 1) * V)
        kv = torch.outer(k[keys], v[values])
        outputs.append(r[keys] @ (S[h] + torch.diag(u[h]) @ kv))
        states.append(torch.diag(decay[keys]) @ S[h] + kv)
    return torch.stack(outputs), torch.stack(states)


def group_norm(o: Tensor, eps: float) -> Tensor:
    """Heads [H,V], each normalised alone, side by side."""
    return torch.cat([(one - one.mean()) / (((one - one.mean()) ** 2).mean() + eps).sqrt() for one in o])


def channel_mix(x: Tensor, p: Tensor, w: Weights) -> Tensor:
    dx = p - x
    k = torch.clamp(w["key.weight"] @ (x + dx * w["time_maa_k"].view(-1)), min=0) ** 2
    return sigmoid(w["receptance.weight"] @ (x + dx * w["time_maa_r"].view(-1))) * (w["value.weight"] @ k)


def fla_logits(weights: Weights, tokens: Tensor, norm_eps: float, group_norm_eps: float) -> Tensor:
    """fla's names, one sequence [T]: logits [T,vocabulary]."""
    w = doubled(weights)
    H, K = w["model.layers.0.attn.bonus"].shape
    V = len(w["model.layers.0.attn.g_norm.weight"]) // H
    zero = torch.zeros_like(w["model.embeddings.weight"][0])
    memory = [(zero, torch.zeros(H, K, V, dtype=torch.float64), zero) for _ in range(depth(w, "model.layers."))]
    result = []
    for token in tokens.tolist():
        x = layer_norm(w["model.embeddings.weight"][token], w, "model.layers.0.pre_norm", norm_eps)
        for i, (p_time, S, p_channel) in enumerate(memory):
            layer = below(w, f"model.layers.{i}.")
            normed = layer_norm(x, layer, "attn_norm", norm_eps)
            dx = p_time - normed
            hidden = torch.tanh(layer["attn.x_proj.0.linear.weight"] @ (normed + dx * layer["attn.x_proj.0.mu"]))
            M = len(hidden) // 5
            mixed = {}
            for j, name in enumerate("rwkvg"):
                offset = layer["attn.x_proj.2.weight"][:, j * M : (j + 1) * M] @ hidden[j * M : (j + 1) * M]
                mixed[name] = normed + dx * (offset + layer["attn.x_bias"][j])
            r, k, v, g = (layer[f"attn.{one}_proj.linear.weight"] @ mixed[one] for one in "rkvg")
            inner = torch.tanh(layer["attn.w_proj.linear.lora.0.weight"] @ mixed["w"])
            decay = layer["attn.w_proj.linear.lora.2.weight"] @ inner + layer["attn.w_proj.linear.lora.2.bias"]
            o, S = recurrence(r, k, v, torch.exp(-torch.exp(decay)), layer["attn.bonus"], S)
            o = group_norm(o, group_norm_eps) * layer["attn.g_norm.weight"] + layer["attn.g_norm.bias"]
            x = x + layer["attn.o_proj.weight"] @ (o * silu(g))

            last = layer_norm(x, layer, "ffn_norm", norm_eps)
            dx = p_channel - last
            k = torch.clamp(layer["ffn.key.linear.weight"] @ (last + dx * layer["ffn.key.mu"]), min=0) ** 2
            gate = sigmoid(layer["ffn.receptance.linear.weight"] @ (last + dx * layer["ffn.receptance.mu"]))
            x = x + gate * (layer["ffn.value.weight"] @ k)
            memory[i] = normed, S, last
        result.append(w["lm_head.weight"] @ layer_norm(x, w, "model.norm", norm_eps))
    return torch.stack(result)
