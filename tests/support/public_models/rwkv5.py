"""RWKV-5: BlinkDL's names of 5.0, 5.1 and 5.2, and those of the Hugging Face remote code (5.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import Draw, Weights, depth, doubled, sigmoid, silu
from .rwkv6 import evaluated, group_norm, recurrence

VERSIONS = ("5.0", "5.1", "5.2")


def draw(version: str = "5.2", seed: int = 1, *, V: int = 13, C: int = 24, n: int = 8, F: int = 40, layers: int = 2) -> Weights:
    """BlinkDL's names and shapes. 5.0 and 5.1 have one decay a head and ``time_first``; 5.0 has no gate."""
    random = Draw(seed)
    H = C // n
    w = {"emb.weight": random(V, C, size=1.0)}
    for i in range(layers):
        for norm in ["ln0"] * (i == 0) + ["ln1", "ln2"]:
            w |= {f"blocks.{i}.{norm}.weight": random(C, middle=1), f"blocks.{i}.{norm}.bias": random(C)}
        gated = version != "5.0"
        att = {f"time_mix_{one}": random(1, 1, C, middle=0.5) for one in ("kvrg" if gated else "kvr")}
        if version == "5.2":
            att |= {"time_decay": random(H, n, size=1.0, middle=-1), "time_faaaa": random(H, n)}
        else:
            att |= {"time_decay": random(H, size=1.0, middle=-1), "time_first": random(H, middle=-1)}
        maps = ["receptance", "key", "value", "output"] + ["gate"] * gated
        att |= {f"{one}.weight": random.matrix(C, C) for one in maps}
        att |= {"ln_x.weight": random(C, middle=1), "ln_x.bias": random(C)}
        ffn = {"time_mix_k": random(1, 1, C, middle=0.5), "time_mix_r": random(1, 1, C, middle=0.5)}
        ffn |= {"key.weight": random.matrix(F, C), "receptance.weight": random.matrix(C, C), "value.weight": random.matrix(C, F)}
        w |= {f"blocks.{i}.att.{name}": x for name, x in att.items()} | {f"blocks.{i}.ffn.{name}": x for name, x in ffn.items()}
    w |= {"ln_out.weight": random(C, middle=1), "ln_out.bias": random(C), "head.weight": random.matrix(V, C)}
    return w


def hf_names(w: Weights) -> Weights:
    """As in RWKV/rwkv-5-world-*: the mixing weights have long names there."""
    longer = {"k": "key", "v": "value", "r": "receptance", "g": "gate"}
    renamed = {}
    for name, x in w.items():
        head, mix, letter = name.rpartition(".time_mix_")
        name = f"{head}{mix}{longer[letter]}" if mix else name
        name = name.replace("blocks.0.ln0.", "blocks.0.pre_ln.").replace("emb.", "embeddings.")
        name = name.replace(".att.", ".attention.").replace(".ffn.", ".feed_forward.")
        renamed[name if name == "head.weight" else f"rwkv.{name}"] = x
    return renamed


def hf_config(w: Weights) -> dict[str, object]:
    V, C = w["emb.weight"].shape
    return {
        "model_type": "rwkv5",
        "architectures": ["RwkvForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_rwkv5.Rwkv5Config", "AutoModelForCausalLM": "modeling_rwkv5.RwkvForCausalLM"},
        "attention_hidden_size": C,
        "head_size": w["blocks.0.att.time_faaaa"].shape[1],
        "hidden_size": C,
        "intermediate_size": None,
        "layer_norm_epsilon": 1e-05,
        "num_attention_heads": 64,
        "num_hidden_layers": depth(w, "blocks."),
        "rescale_every": 6,
        "tie_word_embeddings": False,
        "vocab_size": V,
    }


def logits(weights: Weights, tokens: Tensor) -> Tensor:
    """BlinkDL's names, one sequence [T]: logits [T,vocabulary]."""
    w = doubled(weights)
    C = w["emb.weight"].shape[1]
    H = len(w["blocks.0.att.time_decay"])
    zero = torch.zeros(C, dtype=torch.float64)
    memory = [(zero, torch.zeros(H, C // H, C // H, dtype=torch.float64), zero) for _ in range(depth(w, "blocks."))]
    return evaluated(w, tokens, memory, time_mix, channel_mix)


def mix(x: Tensor, p: Tensor, m: Tensor) -> Tensor:
    m = m.view(-1)
    return x * m + p * (1 - m)


def time_mix(x: Tensor, p: Tensor, S: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """One token x [C] after p [C]; S [H,K,V]."""
    r = w["receptance.weight"] @ mix(x, p, w["time_mix_r"])
    k = w["key.weight"] @ mix(x, p, w["time_mix_k"])
    v = w["value.weight"] @ mix(x, p, w["time_mix_v"])
    H, n = S.shape[:2]
    bonus = w["time_faaaa"] if "time_faaaa" in w else torch.exp(w["time_first"])
    u = bonus.reshape(H, -1).expand(H, n)  # one value a head in 5.0 and 5.1
    decay = torch.exp(-torch.exp(w["time_decay"])).reshape(H, -1).expand(H, n).reshape(-1)
    o, S = recurrence(r, k, v, decay, u, S)
    normed = group_norm(o / 8, 1e-5) * w["ln_x.weight"] + w["ln_x.bias"]
    if "gate.weight" in w:
        normed = normed * silu(w["gate.weight"] @ mix(x, p, w["time_mix_g"]))
    return w["output.weight"] @ normed, S


def channel_mix(x: Tensor, p: Tensor, w: Weights) -> Tensor:
    k = torch.clamp(w["key.weight"] @ mix(x, p, w["time_mix_k"]), min=0) ** 2
    return sigmoid(w["receptance.weight"] @ mix(x, p, w["time_mix_r"])) * (w["value.weight"] @ k)
