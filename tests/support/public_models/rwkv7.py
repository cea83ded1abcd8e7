"""RWKV-7 ("Goose", x070): the formulas in BlinkDL's names, and the layouts of other projects."""

import math
from pathlib import Path

import torch
from torch import Tensor

from public_models import Weights, below, depth, doubled, layer_norm, sigmoid

LOW_RANK = {"w": 5, "a": 4, "v": 3, "g": 6}


def draw(layers: int = 2, C: int = 16, heads: int = 2, first: bool = False, deep: int = 0, attention: int = 0) -> Weights:
    """Random weights of a small model; ``first``: also the unused v0, v1 and v2 of layer 0, which some files have.

    ``deep``: with DeepEmbed (rwkv7a), whose matrices of tokens have this size. ``attention``: with attention (rwkv7b) of this rank.
    """
    generator, vocab_size, A, F = torch.Generator().manual_seed(7), 13, C, 40

    def random(*shape: int, size: float = 0.3, mean: float = 0.0) -> Tensor:
        return (mean + size * torch.randn(shape, generator=generator, dtype=torch.float64)).float()

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
        if deep:
            w |= {f"{ffn}s_emb.weight": random(vocab_size, deep * deep), f"{ffn}s_emb_x.weight": random(deep * deep, C)}
            w |= {f"{ffn}s1": random(C, deep), f"{ffn}s2": random(deep, F), f"{ffn}s0": random(1, 1, F, mean=1.0)}
        if attention:
            qkv, K = f"blocks.{i}.qkv.", 3 * attention
            w |= {f"{qkv}qq.weight": random(K, C), f"{qkv}x_q": random(1, 1, K, mean=0.5)}
            for one, size in {"k": K, "v": C}.items():
                w |= {f"{qkv}{one}1": random(C, attention), f"{qkv}{one}2": random(attention, size)}
                w |= {f"{qkv}{one}_emb.weight": random(vocab_size, size, mean=1.0), f"{qkv}{one}_emb_x.weight": random(size, C)}
                w |= {f"{qkv}x_{one}": random(1, 1, size, mean=0.5)}
            for one, size in {"q": K, "k": K, "v": C}.items():
                w |= {f"{qkv}ln{one}.weight": random(size, mean=1.0, size=1.0), f"{qkv}ln{one}.bias": random(size)}
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


def channel_mix(x: Tensor, p: Tensor, w: Weights, token: int = 0, embedded: Tensor | None = None) -> Tensor:
    """``embedded``: the normed embedding of the token, for DeepEmbed."""
    squares = (w["key.weight"] @ (x + (p - x) * w["x_k"].reshape(-1))).clamp(min=0) ** 2
    if embedded is not None:
        E = w["s1"].shape[1]
        table = (w["s_emb.weight"][token] + w["s_emb_x.weight"] @ embedded).reshape(E, E)
        factors = [sum(w["s1"][:, i] @ x * table[i, j] for i in range(E)) for j in range(E)]
        squares = squares * (w["s2"].T @ torch.stack(factors) + w["s0"].reshape(-1))
    return w["value.weight"] @ squares


def attention(x: Tensor, w: Weights, token: int, embedded: Tensor, past: dict, eps: float = 1e-5) -> Tensor:
    """One token of the residual stream x [C]; ``past`` has the last query, key and value, and all earlier keys and values."""
    given = {
        "q": w["qq.weight"] @ x,
        "k": x @ w["k1"] @ w["k2"] * (w["k_emb.weight"][token] + w["k_emb_x.weight"] @ embedded),
        "v": torch.tanh(x @ w["v1"] @ w["v2"]) * (w["v_emb.weight"][token] + w["v_emb_x.weight"] @ embedded),
    }
    now = {}
    for one, u in given.items():
        before = past.get(one, torch.zeros_like(u))
        now[one] = layer_norm(u + (before - u) * w[f"x_{one}"].reshape(-1), w, f"ln{one}", eps)
        past[one] = u
    past.setdefault("keys", []).append(now["k"])
    past.setdefault("values", []).append(now["v"])
    scores = torch.stack([64 * torch.tanh(now["q"] @ key / (64 * math.sqrt(len(key)))) for key in past["keys"]])
    weights = torch.exp(scores)
    return weights / weights.sum() @ torch.stack(past["values"])


def with_time_state(w: Weights, seed: int = 8) -> Weights:
    """The same weights with tuned initial states, V x K."""
    generator = torch.Generator().manual_seed(seed)
    names = [name.replace("r_k", "time_state") for name in w if name.endswith("att.r_k")]
    heads, n = w["blocks.0.att.r_k"].shape
    return w | {name: torch.randn(heads, n, n, generator=generator) for name in names}


def hf_names(w: Weights) -> Weights:
    """The names of the remote code."""
    found = {}
    for name, x in w.items():
        name = name.replace("emb.", "embeddings.").replace("blocks.0.ln0", "blocks.0.pre_ln")
        name = name.replace(".att.", ".attention.").replace(".ffn.", ".feed_forward.")
        found[name if name.startswith("head.") else f"rwkv.{name}"] = x
    return found


def hf_config(w: Weights) -> dict[str, object]:
    V, C = w["emb.weight"].shape
    sizes = {"vocab_size": V, "hidden_size": C, "head_size": w["blocks.0.att.r_k"].shape[1], "num_hidden_layers": depth(w, "blocks.")}
    return {"model_type": "rwkv7", "architectures": ["Rwkv7ForCausalLM"], "layer_norm_epsilon": 1e-5, **sizes}


def web_rwkv(w: Weights) -> Weights:
    """The tensors of web-rwkv's converter: low-rank weights and tuned states with swapped axes, others without axes of size 1."""
    swapped = ("w1", "w2", "a1", "a2", "g1", "g2", "v1", "v2", "time_state")
    return {name: (x.transpose(-2, -1) if name.endswith(swapped) else x.squeeze()).contiguous() for name, x in w.items()}


def write_st(w: Weights, folder: Path) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(w, folder / "small.st")
    return folder / "small.st"


FLA = {
    "emb.weight": "model.embeddings.weight", "ln_out.weight": "model.norm.weight", "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight", "ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att": "attn", "receptance": "r_proj",
    "key": "k_proj", "value": "v_proj", "output": "o_proj", "ln_x": "g_norm",
}  # fmt: skip


def fla_names(w: Weights, fused: bool = False) -> Weights:
    """fla's layout of the same model; ``fused``: token shifts are one tensor, as in its early versions."""
    found = {}
    for name, x in w.items():
        if name in FLA:
            found[FLA[name]] = x
            continue
        _, layer, part, *rest = name.split(".")
        if part == "att" and rest[0][0] in LOW_RANK and rest[0][1:] in ("0", "1", "2"):
            place = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[rest[0][1:]]
            x = x.reshape(-1) if rest[0][1:] == "0" else x.T
            rest = [f"{rest[0][0]}_lora", "lora", place]
        elif part == "att":
            rest[0] = FLA.get(rest[0], rest[0])
            x = x.reshape(-1) if rest[0] in ("k_k", "k_a") else x
        elif rest[0] == "x_k":
            x = x.reshape(-1)
        found[".".join(["model.layers", layer, FLA.get(part, part), *rest])] = x.contiguous()
    if fused:
        for n in range(depth(w, "blocks.")):
            prefix = f"model.layers.{n}.attn."
            found[f"{prefix}x_x"] = torch.stack([found.pop(f"{prefix}x_{one}").reshape(-1) for one in "rwkvag"])
    return found


def fla_config(w: Weights, norm_eps: float = 1e-5) -> dict[str, object]:
    V, C = w["emb.weight"].shape
    layers, (heads, n) = depth(w, "blocks."), w["blocks.0.att.r_k"].shape
    return {
        "model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"], "attn": None, "attn_mode": "chunk", "vocab_size": V, "hidden_size": C,
        "num_hidden_layers": layers, "head_dim": n, "num_heads": heads, "value_dim": [C] * layers, "hidden_act": "sqrelu",
        "intermediate_size": len(w["blocks.0.ffn.key.weight"]), "hidden_ratio": 4.0, "norm_eps": norm_eps, "norm_bias": True,
        "norm_first": True, "tie_word_embeddings": False, "fuse_norm": True, "a_low_rank_dim": 4, "decay_low_rank_dim": 5,
        "gate_low_rank_dim": 6, "v_low_rank_dim": 3,
    }  # fmt: skip


def logits(w: Weights, ids: Tensor, norm_eps: float = 1e-5, group_norm_eps: float = 64e-5) -> Tensor:
    """Logits [T,V] of one sequence, token by token in float64."""
    w = doubled(w)
    layers, C = depth(w, "blocks."), w["emb.weight"].shape[1]
    H, n = w["blocks.0.att.r_k"].shape
    zero = torch.zeros(C, dtype=torch.float64)
    before = [[zero, zero] for _ in range(layers)]
    states = [w.get(f"blocks.{i}.att.time_state", torch.zeros(H, n, n, dtype=torch.float64)) for i in range(layers)]
    found, pasts = [], [{} for _ in range(layers)]
    for token in ids.tolist():
        embedded = x = layer_norm(w["emb.weight"][token], w, "blocks.0.ln0", norm_eps)
        first, deep = None, "blocks.0.ffn.s1" in w
        for i in range(layers):
            block = below(w, f"blocks.{i}.")
            normed = layer_norm(x, block, "ln1", norm_eps)
            y, states[i], own = time_mix(normed, before[i][0], states[i], below(block, "att."), first, group_norm_eps)
            first = own if i == 0 else first
            if "blocks.0.qkv.k1" in w:
                y = y + attention(x, below(block, "qkv."), token, embedded, pasts[i])
            x, before[i][0] = x + y, normed
            normed = layer_norm(x, block, "ln2", norm_eps)
            y = channel_mix(normed, before[i][1], below(block, "ffn."), token, embedded if deep else None)
            x, before[i][1] = x + y, normed
        found.append(w["head.weight"] @ layer_norm(x, w, "ln_out", norm_eps))
    return torch.stack(found)
