"""The configuration of a language model, and functions that make one for each architecture.

>>> config = gla(vocab_size=256, hidden_size=64, num_layers=2)
>>> Config.from_dict(config.to_dict()) == config
True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal

from ..documentation import described as described_by
from ..errors import Complaints, DtypeError, RangeError, ShapeError, described
from ..layers import (
    CONFIGS,
    GLAConfig,
    LinearAttentionConfig,
    Mamba2Config,
    MixerConfig,
    RetentionConfig,
    RWKV5ChannelConfig,
    RWKV5Config,
    RWKV6ChannelConfig,
    RWKV6Config,
    RWKV7AttentionConfig,
    RWKV7ChannelConfig,
    RWKV7Config,
    SoftmaxAttentionConfig,
    SwiGLUConfig,
)
from ..layers.keywords import checked_fields, checked_keywords
from ..layers.registry import find
from ..layers.sizes import check_fields, check_whole

Norm = Literal["layer_norm", "rms_norm"]
RESCALE_EVERY = 6
"""``rescale_every`` of RWKV in the authors' runtime."""


@checked_fields
@dataclass(frozen=True)
class Config:
    """The sizes of a model: what ``CausalLM`` is built from. Raises DtypeError, RangeError or ShapeError for wrong sizes.

    The functions of this module make the usual ones.
    """

    vocab_size: int
    hidden_size: int
    """C"""
    num_layers: int
    mixer: MixerConfig | tuple[MixerConfig, ...]
    """The token mixer of all layers; for hybrids, one per layer."""
    channel: MixerConfig | tuple[MixerConfig | None, ...] | None = None
    """The channel mixer, likewise. None: layers are token mixers only."""
    norm: Norm = "rms_norm"
    """The norms before mixers and before the head."""
    norm_eps: float = 1e-6
    norm_bias: bool = True
    """Whether layer norms have a bias."""
    embedding_norm: bool = False
    """Whether embeddings are normed (RWKV's ln0)."""
    tie_embeddings: bool = False
    """Whether the head shares the weight of the embeddings."""
    residual_in_float32: bool = False
    """Whether the residual stream is float32 even in float16 and bfloat16 models."""
    rescale_every: int = 0
    """In float16 models, the residual stream is divided by 2 every this many layers, so that it does not overflow; 0: never."""

    def __post_init__(self) -> None:
        complaints = Complaints("Config")
        check_fields(complaints, self)
        if self.norm not in ("layer_norm", "rms_norm"):
            complaints.add(RangeError, "norm", "'layer_norm' or 'rms_norm'", repr(self.norm))
        for name, value in (("mixer", self.mixer), ("channel", self.channel)):
            several = isinstance(value, tuple)
            for one in value if isinstance(value, tuple) else (value,):
                if not (isinstance(one, MixerConfig) or (one is None and name == "channel")):
                    complaints.add(DtypeError, name, f"a MixerConfig or a tuple of {'them' if several else 'several'}", described(one))
            if several and not complaints.found and len(value) != self.num_layers:  # type: ignore[arg-type]
                complaints.add(ShapeError, name, f"one for each of {self.num_layers} layers", len(value))  # type: ignore[arg-type]
        complaints.raise_any()
        for config in self._parts:
            config.require_hidden_size(self.hidden_size)
        self.check_vocab_size(complaints, self.vocab_size)
        complaints.raise_any()

    def check_vocab_size(self, complaints: Complaints, vocab_size: int) -> None:
        """Check that all mixers allow this number of tokens."""
        for config in self._parts:
            config.check_vocab_size(complaints, vocab_size)

    @property
    def _parts(self) -> list[MixerConfig]:
        """The configurations of all mixers and channel mixers, each once."""
        return [one for one in dict.fromkeys((*self.mixers, *self.channels)) if one is not None]

    @property
    def mixers(self) -> tuple[MixerConfig, ...]:
        """The token mixer of each layer."""
        return self.mixer if isinstance(self.mixer, tuple) else (self.mixer,) * self.num_layers

    @property
    def channels(self) -> tuple[MixerConfig | None, ...]:
        """The channel mixer of each layer."""
        return self.channel if isinstance(self.channel, tuple) else (self.channel,) * self.num_layers

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON; a mixer is a dict with its ``kind``."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """The inverse of ``to_dict``. Raises RangeError for unknown or missing names."""
        if not isinstance(values, Mapping):
            complaints = Complaints("Config.from_dict")
            complaints.add(DtypeError, "values", "a mapping, as to_dict returns", described(values))
            complaints.raise_any()
        given = {name: _restored(value) if name in ("mixer", "channel") else value for name, value in values.items()}
        _check_names(cls, "values", given)
        return cls(**given)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, MixerConfig):
        return {"kind": value.kind, **{field.name: _plain(getattr(value, field.name)) for field in fields(value)}}
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_restored(one) for one in value)
    if not isinstance(value, Mapping):
        return value
    kind = str(value.get("kind"))
    config = find(kind)
    if config is None:
        complaints = Complaints("Config.from_dict")
        remedy = "Register a mixer of your own: penstock.layers.register(its Config)."
        complaints.add(RangeError, "kind", f"one of {', '.join(CONFIGS)}", repr(kind), remedy)
        complaints.raise_any()
        raise AssertionError
    sizes = {name: tuple(one) if isinstance(one, list) else one for name, one in value.items() if name != "kind"}
    _check_names(config, kind, sizes)
    return config(**sizes)


def _check_names(config: type[Any], name: str, values: Mapping[str, Any]) -> None:
    """Check that a configuration has these fields, and that none without default is missing."""
    known = {field.name: field.default is MISSING for field in fields(config)}
    complaints = Complaints("Config.from_dict")
    for one in sorted(set(values) - set(known), key=str):
        complaints.add(RangeError, name, f"made of {', '.join(sorted(known))}", repr(one))
    for one in (one for one, required in known.items() if required and one not in values):
        complaints.add(RangeError, name, f"a mapping with {one}", f"{', '.join(map(str, values)) or 'nothing'}")
    complaints.raise_any()


ARGUMENTS = {
    "vocab_size": "int\nRows of the embeddings and of the head.",
    "hidden_size": "int\nC, the size of the residual stream.",
    "num_layers": "int",
    "intermediate_size": "int, optional\nF, the width of channel mixers. Default: that of published models, for this hidden_size.",
    "num_heads": "int, optional\nH.",
    "num_kv_heads": "int, optional\nG, heads of k and v; each serves num_heads / num_kv_heads heads of q. Default: num_heads.",
    "head_size": "int\nChannels of a head.",
    "head_dim": "int\nChannels of a head.",
    "state_size": "int\nKey channels of a head, the rows of its state.",
    "n_groups": "int\nHeads of B and C (k and q), each of which serves num_heads / n_groups heads.",
    "version": '"5.0", "5.1" or "5.2"\nOf the formula.',
    "mix_rank": "int, optional\nThe rank of the five offsets of token shifts. Default: 32, and 64 from hidden_size 4096 on.",
    "decay_rank": "int, optional\nThe rank of the decay. Default: that of published models, for this hidden_size.",
    "rate_rank": "int, optional\nThe rank of the in-context learning rate. Default: decay_rank of published models.",
    "value_rank": "int, optional\nThe rank of the weight of layer 0's values. Default: that of published models.",
    "gate_rank": "int, optional\nThe rank of the output gate. Default: that of published models.",
    "embedding_rank": "int, optional\nE of DeepEmbed: each token has a matrix [E,E] in each channel mix. Default: no DeepEmbed.",
    "attention_rank": "int, optional\nOf the keys and values of attention in each time mix. Default: no attention.",
    "conv_size": "int\nThe width of short convolutions of q, k and v. 0: none.",
    "feature_map": 'str or None\nOf q and k: "elu+1", "relu", "identity", "silu", "sigmoid", "squared_relu" or None.',
    "normalize": "bool\nDivide by the sum of the weights.",
    "tie_embeddings": "bool\nWhether the head's weight is that of the embeddings.",
    "config": "Config\nThat of the model without attention.",
    "attention": "SoftmaxAttentionConfig",
    "layers": "iterable of int\nIndices of the layers with attention, from 0.",
}
"""The descriptions of the arguments of the functions below."""


@checked_keywords
@described_by(ARGUMENTS)
def rwkv5(
    *, vocab_size: int, hidden_size: int, num_layers: int, intermediate_size: int | None = None, head_size: int = 64,
    num_heads: int | None = None, version: Literal["5.0", "5.1", "5.2"] = "5.2",
) -> Config:  # fmt: skip
    """RWKV-5 ("Eagle"). Defaults as in published models; num_heads is hidden_size / head_size.

    <arguments>
    """
    return _rwkv(
        vocab_size, hidden_size, num_layers, RWKV5Config(head_size, num_heads, version=version),
        RWKV5ChannelConfig(_channel_size(hidden_size) if intermediate_size is None else intermediate_size),
    )  # fmt: skip


@checked_keywords
@described_by(ARGUMENTS)
def rwkv6(
    *, vocab_size: int, hidden_size: int, num_layers: int, intermediate_size: int | None = None, head_size: int = 64,
    num_heads: int | None = None, mix_rank: int | None = None, decay_rank: int | None = None,
) -> Config:  # fmt: skip
    """RWKV-6 ("Finch", x060). Defaults as in published models; num_heads is hidden_size / head_size.

    <arguments>

    >>> rwkv6(vocab_size=65536, hidden_size=2048, num_layers=24).channel
    RWKV6ChannelConfig(intermediate_size=7168)
    """
    channel = RWKV6ChannelConfig(_channel_size(hidden_size) if intermediate_size is None else intermediate_size)
    large = 1 + (hidden_size >= 4096)
    ranks = 32 * large if mix_rank is None else mix_rank, 64 * large if decay_rank is None else decay_rank
    mixer = RWKV6Config(head_size, num_heads=num_heads, mix_rank=ranks[0], decay_rank=ranks[1])
    return _rwkv(vocab_size, hidden_size, num_layers, mixer, channel)


@checked_keywords
@described_by(ARGUMENTS)
def rwkv7(
    *, vocab_size: int, hidden_size: int, num_layers: int, intermediate_size: int | None = None, head_size: int = 64,
    num_heads: int | None = None, decay_rank: int | None = None, rate_rank: int | None = None, value_rank: int | None = None,
    gate_rank: int | None = None, embedding_rank: int | None = None, attention_rank: int | None = None,
) -> Config:  # fmt: skip
    """RWKV-7 ("Goose", x070), also with DeepEmbed (rwkv7a) and with attention (rwkv7b). Defaults as in published models.

    num_heads is hidden_size / head_size.

    <arguments>

    >>> rwkv7(vocab_size=65536, hidden_size=2560, num_layers=32).mixer.gate_rank
    320
    """
    _check_hidden_size(hidden_size)
    root = hidden_size**0.5
    usual = (1.8 * root, 1.8 * root, 1.3 * root, 0.6 * hidden_size**0.8)
    given = decay_rank, rate_rank, value_rank, gate_rank
    decay, rate, value, gate = (max(32, 32 * round(size / 32)) if rank is None else rank for size, rank in zip(usual, given))
    mixer = RWKV7Config(head_size, num_heads, decay, rate, value, gate)
    if attention_rank is not None:
        mixer = RWKV7AttentionConfig(**asdict(mixer), vocab_size=vocab_size, attention_rank=attention_rank)
    inner = 4 * hidden_size if intermediate_size is None else intermediate_size
    channel = RWKV7ChannelConfig(inner, embedding_rank, None if embedding_rank is None else vocab_size)
    return replace(_rwkv(vocab_size, hidden_size, num_layers, mixer, channel), rescale_every=0)


def _channel_size(hidden_size: int) -> int:
    """The usual width of a channel mix: 3.5 * hidden_size, rounded down to a multiple of 32."""
    _check_hidden_size(hidden_size)
    return max(int(hidden_size * 3.5) // 32 * 32, 32)


def _check_hidden_size(hidden_size: object) -> None:
    """Check a size before other sizes are computed from it."""
    complaints = Complaints("Config")
    check_whole(complaints, "hidden_size", hidden_size, 1)
    complaints.raise_any()


def _rwkv(vocab_size: int, hidden_size: int, num_layers: int, mixer: MixerConfig, channel: MixerConfig) -> Config:
    return Config(
        vocab_size,
        hidden_size,
        num_layers,
        mixer,
        channel,
        norm="layer_norm",
        norm_eps=1e-5,
        embedding_norm=True,
        rescale_every=RESCALE_EVERY,
    )


@checked_keywords
@described_by(ARGUMENTS)
def gla(
    *, vocab_size: int, hidden_size: int, num_layers: int, intermediate_size: int | None = None, num_heads: int = 4,
    num_kv_heads: int | None = None, conv_size: int = 0,
) -> Config:  # fmt: skip
    """Gated linear attention with a gated feed-forward layer. Defaults as in published models.

    <arguments>
    """
    mixer = GLAConfig(num_heads, num_kv_heads, conv_size=conv_size)
    return Config(vocab_size, hidden_size, num_layers, mixer, feed_forward(intermediate_size, hidden_size))


@checked_keywords
@described_by(ARGUMENTS)
def retnet(
    *, vocab_size: int, hidden_size: int, num_layers: int, intermediate_size: int | None = None, num_heads: int = 8,
    num_kv_heads: int | None = None, conv_size: int = 0,
) -> Config:  # fmt: skip
    """RetNet with a gated feed-forward layer. Defaults as in published models.

    <arguments>
    """
    mixer = RetentionConfig(num_heads, num_kv_heads, conv_size=conv_size)
    return Config(vocab_size, hidden_size, num_layers, mixer, feed_forward(intermediate_size, hidden_size, 2))


@checked_keywords
@described_by(ARGUMENTS)
def linear(
    *, vocab_size: int, hidden_size: int, num_layers: int, intermediate_size: int | None = None, num_heads: int = 8,
    feature_map: str | None = "elu+1", normalize: bool = False,
) -> Config:  # fmt: skip
    """Linear attention with a gated feed-forward layer.

    <arguments>
    """
    mixer = LinearAttentionConfig(num_heads, feature_map=feature_map, normalize=normalize)
    return Config(vocab_size, hidden_size, num_layers, mixer, feed_forward(intermediate_size, hidden_size))


def feed_forward(intermediate_size: int | None, hidden_size: int, ratio: float = 4) -> SwiGLUConfig:
    """A gated feed-forward layer of this size; by default, of the usual one."""
    _check_hidden_size(hidden_size)
    return SwiGLUConfig(feed_forward_size(hidden_size, ratio) if intermediate_size is None else intermediate_size)


@checked_keywords
@described_by(ARGUMENTS)
def mamba2(
    *, vocab_size: int, hidden_size: int, num_layers: int, num_heads: int | None = None, head_dim: int = 64, state_size: int = 128,
    n_groups: int = 1, tie_embeddings: bool = True,
) -> Config:  # fmt: skip
    """Mamba-2: layers of token mixers only. Defaults as in published models; num_heads is 2 * hidden_size / head_dim.

    <arguments>

    >>> mamba2(vocab_size=50288, hidden_size=768, num_layers=24).mixer.num_heads
    24
    """
    if num_heads is None:
        _check_hidden_size(hidden_size)
        complaints = Complaints("mamba2")
        check_whole(complaints, "head_dim", head_dim, 1)
        if not complaints.found and 2 * hidden_size % head_dim:
            complaints.add(RangeError, "head_dim", f"a divisor of 2 * hidden_size = {2 * hidden_size}", head_dim, "Or pass num_heads.")
        complaints.raise_any()
        num_heads = 2 * hidden_size // head_dim
    mixer = Mamba2Config(num_heads, head_dim, state_size, n_groups)
    return Config(
        vocab_size, hidden_size, num_layers, mixer, norm_eps=1e-5, tie_embeddings=tie_embeddings, residual_in_float32=True
    )  # fmt: skip


@checked_keywords
@described_by(ARGUMENTS)
def hybrid(config: Config, attention: SoftmaxAttentionConfig, layers: Iterable[int]) -> Config:
    """The same model with softmax attention in some layers.

    <arguments>

    >>> config = hybrid(gla(vocab_size=256, hidden_size=64, num_layers=4), SoftmaxAttentionConfig(num_heads=4), layers=[1, 3])
    >>> [mixer.kind for mixer in config.mixers]
    ['gla', 'softmax_attention', 'gla', 'softmax_attention']
    """
    complaints = Complaints("hybrid")
    if not isinstance(config, Config):
        complaints.add(DtypeError, "config", "a Config", described(config))
        complaints.raise_any()
    chosen = list(layers) if isinstance(layers, Iterable) else [layers]
    for layer in chosen:
        if isinstance(layer, bool) or not isinstance(layer, int):
            complaints.add(DtypeError, "layers", "whole numbers", described(layer))
        elif not 0 <= layer < config.num_layers:
            complaints.add(RangeError, "layers", f"from 0 to {config.num_layers - 1}", layer)
    complaints.raise_any()
    return replace(config, mixer=tuple(attention if n in chosen else mixer for n, mixer in enumerate(config.mixers)))


def feed_forward_size(hidden_size: int, ratio: float = 4) -> int:
    """The usual width of a gated feed-forward layer: 2/3 ratio * hidden_size, rounded up to a multiple of 256."""
    return 256 * ((int(hidden_size * ratio * 2 / 3) + 255) // 256)
