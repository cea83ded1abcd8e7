"""Models of published sizes with random weights, which the benchmarks share."""

from collections.abc import Callable

import torch

from penstock.models import CausalLM, Config, gated_deltanet, gla, kda, mamba2, rwkv6, rwkv7

SIZES: dict[str, tuple[Callable[..., Config], dict]] = {
    "rwkv6": (rwkv6, {"vocab_size": 65536, "hidden_size": 2048, "num_layers": 24}),
    "rwkv7": (rwkv7, {"vocab_size": 65536, "hidden_size": 2048, "num_layers": 24}),
    "gla": (gla, {"vocab_size": 32000, "hidden_size": 2048, "num_layers": 24, "num_heads": 4}),
    "mamba2": (mamba2, {"vocab_size": 50288, "hidden_size": 2048, "num_layers": 48}),
    "gated_deltanet": (gated_deltanet, {"vocab_size": 32000, "hidden_size": 2048, "num_layers": 21}),
    "kda": (kda, {"vocab_size": 32000, "hidden_size": 2048, "num_layers": 24}),
}
"""RWKV-6 1.6B, RWKV-7 1.5B, GLA 1.3B, Mamba-2 1.3B, gated DeltaNet 1.3B, KDA 1.5B."""
SMALL = {"vocab_size": 300, "hidden_size": 32, "num_layers": 2}
SMALL_HEADS = {
    "rwkv6": {"head_size": 8}, "rwkv7": {"head_size": 8}, "gla": {"num_heads": 2}, "mamba2": {"head_dim": 8, "state_size": 16},
    "gated_deltanet": {"num_heads": 2, "head_dim": 8}, "kda": {"num_heads": 2, "head_dim": 8},
}  # fmt: skip


def config_of(name: str, tiny: bool = False, **sizes) -> Config:
    """The configuration of a model of ``SIZES``; ``sizes`` replaces some."""
    make, published = SIZES[name]
    return make(**{**(SMALL | SMALL_HEADS[name] if tiny else published), **sizes})


def model_of(config: Config, dtype: torch.dtype, device: str) -> CausalLM:
    """A model with random weights."""
    with torch.device("meta"):
        model = CausalLM(config)
    model = model.to(dtype).to_empty(device=device).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_x" in name:
            torch.nn.init.constant_(parameter, float(name.endswith("weight")))
        else:
            torch.nn.init.normal_(parameter, std=1.0 if name == "embeddings.weight" else 0.02)
    return model
