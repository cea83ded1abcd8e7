"""Small models of every architecture, with weights that differ from their initial values."""

import math
from dataclasses import replace

import torch
from own_mixer import WindowMeanConfig
from torch import Tensor, nn

from penstock.layers import (
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    KDAConfig,
    LinearAttentionConfig,
    Mamba2Config,
    MixerConfig,
    RetentionConfig,
    RWKV7AttentionConfig,
    SoftmaxAttentionConfig,
)
from penstock.layers.arguments import mapped
from penstock.models import CausalLM, Config, delta_net, gated_deltanet, gla, hybrid, kda, linear, mamba2, retnet, rwkv5, rwkv6, rwkv7
from penstock.models.arguments import named_tensors

SIZES = {"vocab_size": 13, "hidden_size": 24, "num_layers": 2}
NARROW = {**SIZES, "intermediate_size": 40}


def with_mixer(config: Config, mixer) -> Config:
    return replace(config, mixer=mixer)


ARCHITECTURES: dict[str, Config] = {
    "rwkv6": rwkv6(**NARROW, head_size=8, mix_rank=5, decay_rank=6),
    "rwkv7": rwkv7(**NARROW, head_size=8, decay_rank=6, rate_rank=4, value_rank=2, gate_rank=8),
    "rwkv7a": rwkv7(**NARROW, head_size=8, decay_rank=6, rate_rank=4, value_rank=2, gate_rank=8, embedding_rank=4),
    "rwkv7b": with_mixer(
        rwkv7(**NARROW, head_size=8, embedding_rank=4),
        RWKV7AttentionConfig(
            8, decay_rank=6, rate_rank=4, value_rank=2, gate_rank=8, vocab_size=13, attention_size=12, attention_rank=6, max_length=1024
        ),
    ),
    "rwkv5.0": rwkv5(**NARROW, head_size=8, version="5.0"),
    "rwkv5.1": rwkv5(**NARROW, head_size=8, version="5.1"),
    "rwkv5.2": rwkv5(**NARROW, head_size=8, version="5.2"),
    "gla": gla(**NARROW, num_heads=3),
    "gla_grouped": with_mixer(
        gla(**NARROW),
        GLAConfig(num_heads=4, num_kv_heads=2, conv_size=3, conv_bias=True, feature_map="silu", expand_k=1.0, clamp_min=-0.05),
    ),
    "gla_plain": with_mixer(gla(**NARROW), GLAConfig(num_heads=2, use_output_gate=False, use_output_norm=False)),
    "retnet": retnet(**NARROW, num_heads=3),
    "retnet_grouped": with_mixer(retnet(**NARROW), RetentionConfig(num_heads=4, num_kv_heads=1, conv_size=4, elementwise_affine=False)),
    "linear": linear(**NARROW, num_heads=3),
    "linear_normalized": with_mixer(
        linear(**NARROW), LinearAttentionConfig(num_heads=2, normalize=True, feature_map="sigmoid", use_output_norm=False)
    ),
    "mamba2": mamba2(**SIZES, head_dim=8, state_size=10),
    "mamba2_grouped": with_mixer(
        mamba2(**SIZES, head_dim=8, tie_embeddings=False),
        Mamba2Config(4, 6, 5, n_groups=2, conv_kernel=3, use_conv_bias=False, use_bias=True, time_step_limit=(0.01, 0.5)),
    ),
    "delta_net": delta_net(**NARROW, num_heads=3),
    "delta_net_gated": with_mixer(
        delta_net(**NARROW, num_heads=2),
        DeltaNetConfig(2, use_beta=False, use_gate=True, qk_activation="elu+1", qk_norm="sum", expand_v=1.5, conv_size=3, conv_bias=True),
    ),
    "gated_deltanet": gated_deltanet(**NARROW, num_heads=2, head_dim=6, num_v_heads=4),
    "gated_deltanet_plain": with_mixer(
        gated_deltanet(**NARROW), GatedDeltaNetConfig(3, use_gate=False, head_dim=5, conv_size=0, expand_v=1.0, allow_neg_eigval=True)
    ),
    "kda": kda(**NARROW, num_heads=3, head_dim=6),
    "kda_bounded": with_mixer(kda(**NARROW), KDAConfig(2, head_dim=6, num_v_heads=4, expand_v=0.5, gate_low_rank_dim=5, lower_bound=-5.0)),
    "own_mixer": with_mixer(linear(**NARROW), (WindowMeanConfig(3), LinearAttentionConfig(2))),
    "hybrid": hybrid(gla(**NARROW, num_heads=2), SoftmaxAttentionConfig(4, 2, max_length=1024), [1]),
    "hybrid_window": hybrid(
        mamba2(**SIZES, head_dim=8, state_size=10),
        SoftmaxAttentionConfig(3, head_dim=6, window_size=4, qk_norm=True, qkv_bias=True, max_length=1024),
        [0],
    ),
    "hybrid_of_deltas": hybrid(gated_deltanet(**NARROW, num_heads=2, head_dim=6), SoftmaxAttentionConfig(4, 2, max_length=1024), [1]),
    "hybrid_without_rotary": hybrid(rwkv6(**NARROW, head_size=8), SoftmaxAttentionConfig(2, 1, rope_theta=None, max_length=1024), [1]),
}


ATTENDING = [name for name in ARCHITECTURES if name.startswith("hybrid") or name == "rwkv7b"]
"""Those with softmax attention in some layer: their states grow with the tokens, so the host reads sizes."""
MIXERS: dict[str, MixerConfig] = {}
"""Every configuration of a mixer or a channel mixer of these models, once."""
for _name, _config in ARCHITECTURES.items():
    for _part, _one in (("mixer", _config.mixers[0]), ("last mixer", _config.mixers[-1]), ("channel", _config.channels[0])):
        if _one is not None and _one not in MIXERS.values():
            MIXERS[f"{_name} {_part}"] = _one


def randomised(module: nn.Module, seed: int = 1) -> None:
    """Change all parameters: zeros and ones would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            size = 1 / math.sqrt(parameter.shape[-1]) if parameter.dim() == 2 else 0.3
            size = 1.0 if name == "embeddings.weight" else size
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * size)
            if name.endswith(("lnq.weight", "lnk.weight")):
                parameter.mul_(4)  # scores near their bound


def model_of(name: str, dtype: torch.dtype = torch.float32, **changes: int) -> CausalLM:
    """A model; ``changes`` are those of its configuration."""
    torch.manual_seed(0)
    model = CausalLM(replace(ARCHITECTURES[name], **changes))
    randomised(model)
    return model.to(dtype)


def flat(state: object) -> list[Tensor]:
    return [x for _, x in named_tensors(state)]


def unflat(like, tensors):
    """The state of a mixer with these tensors, in the order of ``flat``."""
    rest = iter(tensors)
    return mapped(like, lambda _: next(rest))
