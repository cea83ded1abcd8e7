"""Token mixers and channel mixers as ``nn.Module``, one file per architecture."""

from .delta_heads import DeltaState
from .delta_net import DeltaNet, DeltaNetConfig
from .gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from .gla import GatedLinearAttention, GLAConfig, GLAState
from .kda import KDAConfig, KimiDeltaAttention
from .keywords import checked_fields
from .linear_attention import LinearAttention, LinearAttentionConfig, LinearAttentionState
from .mamba2 import Mamba2, Mamba2Config, Mamba2State
from .mixer import Mixer, MixerConfig, Stateless
from .registry import CONFIGS, register
from .retention import Retention, RetentionConfig, RetentionState
from .rwkv import RWKV5ChannelConfig, RWKV5ChannelMix, RWKV6ChannelConfig, RWKV6ChannelMix, ShiftState
from .rwkv5 import RWKV5Config, RWKV5State, RWKV5TimeMix
from .rwkv6 import RWKV6Config, RWKV6State, RWKV6TimeMix
from .rwkv7 import RWKV7ChannelConfig, RWKV7ChannelMix, RWKV7Config, RWKV7State, RWKV7TimeMix
from .rwkv7_attention import RWKV7AttentionConfig, RWKV7AttentionState, RWKV7AttentionTimeMix
from .sequences import Sequences
from .softmax_attention import SoftmaxAttention, SoftmaxAttentionConfig
from .swiglu import SwiGLU, SwiGLUConfig
from .token_cache import SoftmaxAttentionState

for _config in (
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    KDAConfig,
    LinearAttentionConfig,
    Mamba2Config,
    RetentionConfig,
    RWKV5ChannelConfig,
    RWKV6ChannelConfig,
    RWKV7ChannelConfig,
    RWKV5Config,
    RWKV6Config,
    RWKV7AttentionConfig,
    RWKV7Config,
    SoftmaxAttentionConfig,
    SwiGLUConfig,
):
    register(checked_fields(_config))

__all__ = [
    "CONFIGS",
    "DeltaNet",
    "DeltaNetConfig",
    "DeltaState",
    "GLAConfig",
    "GLAState",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedLinearAttention",
    "KDAConfig",
    "KimiDeltaAttention",
    "LinearAttention",
    "LinearAttentionConfig",
    "LinearAttentionState",
    "Mamba2",
    "Mamba2Config",
    "Mamba2State",
    "Mixer",
    "MixerConfig",
    "RWKV5ChannelConfig",
    "RWKV5ChannelMix",
    "RWKV5Config",
    "RWKV5State",
    "RWKV5TimeMix",
    "RWKV6ChannelConfig",
    "RWKV6ChannelMix",
    "RWKV6Config",
    "RWKV6State",
    "RWKV6TimeMix",
    "RWKV7AttentionConfig",
    "RWKV7AttentionState",
    "RWKV7AttentionTimeMix",
    "RWKV7ChannelConfig",
    "RWKV7ChannelMix",
    "RWKV7Config",
    "RWKV7State",
    "RWKV7TimeMix",
    "Retention",
    "RetentionConfig",
    "RetentionState",
    "Sequences",
    "ShiftState",
    "SoftmaxAttention",
    "SoftmaxAttentionConfig",
    "SoftmaxAttentionState",
    "Stateless",
    "SwiGLU",
    "SwiGLUConfig",
    "register",
]
