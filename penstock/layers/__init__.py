"""Token mixers and channel mixers as ``nn.Module``, one file per architecture."""

from .gla import GatedLinearAttention, GLAConfig, GLAState
from .mixer import Mixer, MixerConfig, Stateless
from .rwkv import RWKV5ChannelConfig, RWKV5ChannelMix, RWKV6ChannelConfig, RWKV6ChannelMix, ShiftState
from .rwkv6 import RWKV6Config, RWKV6State, RWKV6TimeMix
from .sequences import Sequences
from .swiglu import SwiGLU, SwiGLUConfig

CONFIGS: dict[str, type[MixerConfig]] = {
    config.kind: config for config in (RWKV6Config, RWKV6ChannelConfig, RWKV5ChannelConfig, GLAConfig, SwiGLUConfig)
}
"""The configurations of all mixers and channel mixers by the name of their kind."""

__all__ = [
    "CONFIGS",
    "GLAConfig",
    "GLAState",
    "GatedLinearAttention",
    "Mixer",
    "MixerConfig",
    "RWKV5ChannelConfig",
    "RWKV5ChannelMix",
    "RWKV6ChannelConfig",
    "RWKV6ChannelMix",
    "RWKV6Config",
    "RWKV6State",
    "RWKV6TimeMix",
    "Sequences",
    "ShiftState",
    "Stateless",
    "SwiGLU",
    "SwiGLUConfig",
]
