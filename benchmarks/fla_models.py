"""fla's own models for benchmarks."""

from functools import partial

import fla.models as fla
import torch
import triton.testing
from fla.layers.rwkv7 import RWKV7Attention

from penstock.models import Config

VOCABULARY = 4096
"""Of small models."""


def tune_briefly() -> None:
    """Time each configuration for 30 ms after 8 ms, not for 100 after 25: of hundreds of configurations, the rest takes a minute."""
    triton.testing.do_bench = partial(triton.testing.do_bench, warmup=8, rep=30)


def model_of_sizes(name: str, ours: Config) -> torch.nn.Module:
    """fla's model of the same sizes."""
    sizes = {"hidden_size": ours.hidden_size, "num_hidden_layers": ours.num_layers, "vocab_size": ours.vocab_size}
    mixer = ours.mixer
    if name == "rwkv6":
        config = fla.RWKV6Config(**sizes, expand_k=1.0, num_heads=32, intermediate_size=ours.channel.intermediate_size)
        return fla.RWKV6ForCausalLM(config)
    if name == "rwkv7":
        RWKV7Attention._initialize_weights = lambda self, module: None  # a loop over channels in Python; weights are random anyway
        ranks = {
            "decay_low_rank_dim": mixer.decay_rank, "a_low_rank_dim": mixer.rate_rank, "v_low_rank_dim": mixer.value_rank,
            "gate_low_rank_dim": mixer.gate_rank,
        }  # fmt: skip
        return fla.RWKV7ForCausalLM(fla.RWKV7Config(**sizes, **ranks, head_dim=mixer.head_size))
    if name in ("gated_deltanet", "kda"):
        made = {"gated_deltanet": (fla.GatedDeltaNetConfig, fla.GatedDeltaNetForCausalLM), "kda": (fla.KDAConfig, fla.KDAForCausalLM)}
        config, model = made[name]
        return model(config(**sizes, num_heads=mixer.num_heads, head_dim=mixer.head_dim, expand_v=mixer.expand_v))
    return fla.GLAForCausalLM(fla.GLAConfig(**sizes, num_heads=4))


def small_model(name: str, layers: int) -> torch.nn.Module:
    """One of fla's models, with weights as fla initialises them."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    if name == "rwkv6":
        return fla.RWKV6ForCausalLM(fla.RWKV6Config(**sizes, expand_k=1.0, num_heads=16))
    if name == "rwkv7":
        return fla.RWKV7ForCausalLM(fla.RWKV7Config(**sizes, head_dim=64))
    if name == "gated_deltanet":
        return fla.GatedDeltaNetForCausalLM(fla.GatedDeltaNetConfig(**sizes, num_heads=6, head_dim=128))
    return fla.KDAForCausalLM(fla.KDAConfig(**sizes, num_heads=8, head_dim=128))
