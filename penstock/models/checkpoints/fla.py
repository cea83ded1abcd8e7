"""flash-linear-attention's layout of GLA, RetNet, the delta rule and RWKV. All but RWKV also with layers of softmax attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import Complaints, RangeError, described
from ...layers import (
    GLAConfig,
    MixerConfig,
    RetentionConfig,
    RWKV6ChannelConfig,
    RWKV6Config,
    RWKV7ChannelConfig,
    RWKV7Config,
    SoftmaxAttentionConfig,
    SwiGLUConfig,
)
from ...layers.delta_heads import DeltaConfig
from ..config import RESCALE_EVERY, Config
from . import fla_delta, rwkv7
from .archive import Archive
from .layout import Format, Row, check_told, common, divided, flag, flat, needed, norms, number, same, tied, transposed

HeadsConfig = GLAConfig | RetentionConfig
KINDS = ("gla", "retnet", *fla_delta.KINDS, "rwkv6", "rwkv7")
"""``model_type`` in config.json."""
ATTENTION = {"layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta"}
"""The fields of ``attn`` in config.json, which describes layers of softmax attention."""
FEATURE_MAPS = {"swish": "silu", "sqrelu": "squared_relu"}
"""fla's names of feature maps that have another name here."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("g_norm", "g_norm_swish_gate")
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
LINEAR = {"receptance": "r", "key": "k", "value": "v", "gate": "g"}
WORLD = 65536
"""The vocabulary of RWKV's World models. Converted ones need the eps of ln_x that BlinkDL trained with, not that of config.json."""


def rows(config: Config, archive: Archive | None = None) -> list[Row]:
    """The tensors of a model of these sizes."""
    found = common(config, "model.norm", "lm_head.weight", "model.embeddings.weight", "model.layers.0.pre_norm")
    for n, mixer in enumerate(config.mixers):
        ours, theirs = f"layers.{n}.", f"model.layers.{n}."
        rwkv = isinstance(mixer, RWKV6Config | RWKV7Config)
        found += norms(config, f"{ours}mixer_norm", f"{theirs}attn_norm")
        found += norms(config, f"{ours}channel_norm", f"{theirs}{'ffn' if rwkv else 'mlp'}_norm")
        if isinstance(mixer, RWKV6Config):
            found += _rwkv6_rows(f"{ours}mixer.", f"{theirs}attn.") + _rwkv6_channel_rows(f"{ours}channel.", f"{theirs}ffn.")
            continue
        if isinstance(mixer, RWKV7Config):
            found += rwkv7.fla_rows(n, archive, ours, theirs)
            continue
        found += _swiglu_rows(archive, f"{ours}channel.", f"{theirs}mlp.")
        if isinstance(mixer, SoftmaxAttentionConfig):
            names = [f"{one}.weight" for one in PROJECTIONS] + [f"{one}.bias" for one in PROJECTIONS[:3]] * mixer.qkv_bias
            found += [same(f"{ours}mixer.{one}", f"{theirs}attn.{one}") for one in names]
        elif isinstance(mixer, DeltaConfig):
            found += fla_delta.rows(mixer, f"{ours}mixer.", f"{theirs}attn.")
        else:
            assert isinstance(mixer, HeadsConfig)
            found += _heads_rows(mixer, archive, f"{ours}mixer.", f"{theirs}attn.")
    return found


def _heads_rows(mixer: HeadsConfig, archive: Archive | None, ours: str, theirs: str) -> list[Row]:
    names = [f"{one}.weight" for one in PROJECTIONS] + ["g_proj.weight"] * mixer.use_output_gate
    names += ["gk_proj.0.weight", "gk_proj.1.weight", "gk_proj.1.bias"] * isinstance(mixer, GLAConfig)
    for one in CONVOLUTIONS if mixer.conv_size else ():
        names += [f"{one}.weight"] + [f"{one}.bias"] * mixer.conv_bias
    found = [same(ours + one, theirs + one) for one in names]
    if mixer.elementwise_affine:
        fused = mixer.use_output_gate and (archive is None or not archive.has("model.layers.{}.attn.g_norm.weight"))
        found.append(same(f"{ours}norm.weight", f"{theirs}{'g_norm_swish_gate' if fused else 'g_norm'}.weight"))
    return found


def _swiglu_rows(archive: Archive | None, ours: str, theirs: str) -> list[Row]:
    names = ("gate_proj.weight", "up_proj.weight")
    found = [same(f"{ours}down_proj.weight", f"{theirs}down_proj.weight")]
    if archive is None or archive.has("model.layers.{}.mlp.up_proj.weight"):
        return found + [same(ours + one, theirs + one) for one in names]
    both = Row(tuple(ours + one for one in names), (f"{theirs}gate_proj.weight",), lambda x: x.chunk(2), lambda *x: (torch.cat(x),))
    return [*found, both]  # early versions of fla


def _rwkv6_rows(ours: str, theirs: str) -> list[Row]:
    biases = tuple(f"{ours}time_maa_{one}" for one in "rwkvg")
    found = [
        flat(f"{ours}time_maa_x", f"{theirs}x_proj.0.mu"),
        Row((f"{ours}time_maa_w1",), (f"{theirs}x_proj.0.linear.weight",), _read_w1, _write_w1),
        Row((f"{ours}time_maa_w2",), (f"{theirs}x_proj.2.weight",), _read_w2, _write_w2),
        Row(biases, (f"{theirs}x_bias",), lambda x: x.unbind(), lambda *x: (torch.stack([one.reshape(-1) for one in x]),)),
        transposed(f"{ours}time_decay_w1", f"{theirs}w_proj.linear.lora.0.weight"),
        transposed(f"{ours}time_decay_w2", f"{theirs}w_proj.linear.lora.2.weight"),
        flat(f"{ours}time_decay", f"{theirs}w_proj.linear.lora.2.bias"),
        same(f"{ours}time_faaaa", f"{theirs}bonus"),
        same(f"{ours}output.weight", f"{theirs}o_proj.weight"),
    ]
    found += [same(f"{ours}ln_x.{part}", f"{theirs}g_norm.{part}") for part in ("weight", "bias")]
    return found + [same(f"{ours}{name}.weight", f"{theirs}{letter}_proj.linear.weight") for name, letter in LINEAR.items()]


def _rwkv6_channel_rows(ours: str, theirs: str) -> list[Row]:
    found = [same(f"{ours}value.weight", f"{theirs}value.weight")]
    for name in ("key", "receptance"):
        found.append(flat(f"{ours}time_maa_{name[0]}", f"{theirs}{name}.mu"))
        found.append(same(f"{ours}{name}.weight", f"{theirs}{name}.linear.weight"))
    return found


def _reordered(x: Tensor, into: str, order: str) -> Tensor:
    """Parts along the first axis from one order of letters to another."""
    return torch.stack([x[order.index(one)] for one in into])


def _read_w1(x: Tensor) -> tuple[Tensor]:
    """[5M,C] in the order r, w, k, v, g to [C,5M] in the order w, k, v, r, g."""
    return (_reordered(x.unflatten(0, (5, -1)), "wkvrg", "rwkvg").flatten(0, 1).T,)


def _write_w1(x: Tensor) -> tuple[Tensor]:
    return (_reordered(x.T.unflatten(0, (5, -1)), "rwkvg", "wkvrg").flatten(0, 1),)


def _read_w2(x: Tensor) -> tuple[Tensor]:
    """[C,5M] to [5,M,C], reordered likewise."""
    return (_reordered(x.T.unflatten(0, (5, -1)), "wkvrg", "rwkvg"),)


def _write_w2(x: Tensor) -> tuple[Tensor]:
    return (_reordered(x, "rwkvg", "wkvrg").flatten(0, 1).T,)


def config_of(archive: Archive) -> Config:
    """The sizes. Shapes do not tell eps, feature maps and the architecture, so there must be a config.json."""
    stored, complaints = archive.config, Complaints("load")
    needed(archive, "fla's models")
    kind = stored.get("model_type")
    rwkv = kind in ("rwkv6", "rwkv7")
    if kind not in KINDS:
        complaints.add(RangeError, "model_type in config.json", f"{', '.join(KINDS[:-1])} or {KINDS[-1]}", repr(kind))
        complaints.raise_any()  # other rules depend on it
    plain = (None,) if rwkv else (stored.get("attn"),)
    for name, wanted in {"attn": plain, "attnres_block_size": (None,), "use_gv": (False,), "use_gk": (True,)}.items():
        if stored.get(name, wanted[0]) not in wanted:
            complaints.add(RangeError, f"{name} in config.json", " or ".join(map(repr, wanted)), repr(stored[name]))
    activation = stored.get("hidden_act")
    if activation not in ((None, "sqrelu") if rwkv else (None, "swish", "silu")):
        complaints.add(RangeError, "hidden_act in config.json", "sqrelu" if rwkv else "swish", repr(activation))
    complaints.raise_any()
    vocab_size, hidden_size = archive.shape("model.embeddings.weight", "V C")
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_layers": archive.depth("model.layers.")}
    sizes["tie_embeddings"] = tied(archive, flag(archive.config, "tie_word_embeddings", False), "model.embeddings.weight", "lm_head.weight")
    if rwkv:
        return (_rwkv6_config if kind == "rwkv6" else rwkv7.fla_config)(archive, sizes)
    return _attending_config(archive, sizes, str(kind))


def _rwkv6_config(archive: Archive, sizes: dict[str, Any]) -> Config:
    mixing = "model.layers.{}.attn."
    heads, K = archive.shape(f"{mixing}bonus", "H K")
    (inner,) = archive.shape(f"{mixing}g_norm.weight", "A")
    rank, _ = archive.shape(f"{mixing}x_proj.0.linear.weight", "5M C")
    decay_rank, _ = archive.shape(f"{mixing}w_proj.linear.lora.0.weight", "D C")
    width, _ = archive.shape("model.layers.{}.ffn.key.linear.weight", "F C")
    V, eps = divided(inner, heads, f"heads of {mixing}bonus"), number(archive.config, "norm_eps", 1e-5, 0.0)
    converted = sizes["vocab_size"] == WORLD and K == V
    mixer = RWKV6Config(
        V,
        key_size=None if K == V else K,
        num_heads=None if heads * V == sizes["hidden_size"] else heads,
        mix_rank=divided(rank, 5, f"ranks of {mixing}x_proj.0.linear.weight"),
        decay_rank=decay_rank,
        norm_eps=number(archive.config, "group_norm_eps", 64e-5 if converted else eps, 0.0),
    )
    bias = archive.has("model.layers.{}.attn_norm.bias")
    return Config(
        mixer=mixer, channel=RWKV6ChannelConfig(width), norm="layer_norm", norm_eps=eps, norm_bias=bias,
        embedding_norm=any(archive.has(f"model.layers.{{}}.pre_norm.{one}") for one in ("weight", "bias")),
        rescale_every=number(archive.config, "rescale_every", RESCALE_EVERY, 0), **sizes,
    )  # fmt: skip


def _attending_config(archive: Archive, sizes: dict[str, Any], kind: str) -> Config:
    """A model with gated feed-forward layers and, in some layers, softmax attention."""
    count, C = sizes["num_layers"], sizes["hidden_size"]
    attention = _attention(archive, count)
    layers = [n for n in range(count) if n not in attention]
    delta = kind in fla_delta.KINDS
    mixer: Any = fla_delta.mixer_of(archive, kind, C, layers) if delta else _heads_config(archive, C, layers, kind == "gla")
    _, width = archive.shape("model.layers.{}.mlp.down_proj.weight", "C F")
    mixers = tuple(attention.get(n, mixer) for n in range(count)) if attention else mixer
    rescale_every = number(archive.config, "rescale_every", 0, 0)
    return Config(
        mixer=mixers, channel=SwiGLUConfig(width), norm="rms_norm", norm_eps=mixer.norm_eps, rescale_every=rescale_every, **sizes
    )  # fmt: skip


def _heads_config(archive: Archive, C: int, layers: list[int], gla: bool) -> HeadsConfig:
    stored, mixing = archive.config, "model.layers.{}.attn."
    keys, _ = archive.shape(f"{mixing}q_proj.weight", "HK C", layers)
    shared, _ = archive.shape(f"{mixing}k_proj.weight", "GK C", layers)
    _, values = archive.shape(f"{mixing}o_proj.weight", "C HV", layers)
    heads = number(archive.config, "num_heads", 4 if gla else 8, 1)
    served = divided(keys, shared, f"rows of {mixing}k_proj.weight")
    for name, found, size in (("expand_k", keys / C, C), ("expand_v", values / C, C), ("num_kv_heads", heads / served, 1)):
        check_told(stored, name, found, size)
    feature_map: Any = stored.get("feature_map")
    if not isinstance(feature_map, str | None):
        complaints = Complaints("load")
        complaints.add(RangeError, "feature_map in config.json", "a name or null", described(feature_map))
        complaints.raise_any()
    convolved = flag(stored, "use_short_conv", archive.has(f"{mixing}q_conv1d.weight"))
    shape: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": None if served == 1 else divided(heads, served, "heads of q for each of k"),
        "expand_k": keys / C,
        "expand_v": values / C,
        "feature_map": FEATURE_MAPS.get(feature_map, feature_map),
        "conv_size": archive.shape(f"{mixing}q_conv1d.weight", "HK 1 W")[2] if convolved else 0,
        "conv_bias": archive.has(f"{mixing}q_conv1d.bias"),
        "use_output_gate": flag(stored, "use_output_gate", archive.has(f"{mixing}g_proj.weight")),
        "norm_eps": number(archive.config, "norm_eps", 1e-6, 0.0),
        "elementwise_affine": flag(stored, "elementwise_affine", any(archive.has(f"{mixing}{one}.weight") for one in NORMS)),
    }
    if gla:
        rank, _ = archive.shape(f"{mixing}gk_proj.0.weight", "R C")
        shape |= {"gate_low_rank_dim": rank, "clamp_min": number(archive.config, "clamp_min", None)}
        return GLAConfig(**shape)
    return RetentionConfig(**shape)


def _attention(archive: Archive, num_layers: int) -> dict[int, SoftmaxAttentionConfig]:
    """The layers of softmax attention."""
    specs = archive.config.get("attn") or []
    found: dict[int, SoftmaxAttentionConfig] = {}
    complaints = Complaints("load")
    for spec in [specs] if isinstance(specs, dict) else specs if isinstance(specs, list) else [specs]:
        layers: Any = spec.get("layers") if isinstance(spec, dict) else None
        if not isinstance(layers, list) or not all(type(n) is int and 0 <= n < num_layers for n in layers) or not set(spec) <= ATTENTION:
            rule = f"null or objects of {', '.join(sorted(ATTENTION))} with layers below {num_layers}"
            complaints.add(RangeError, "attn in config.json", rule, described(spec))
            complaints.raise_any()
        mixer = SoftmaxAttentionConfig(
            number(spec, "num_heads", 0, 1),
            num_kv_heads=number(spec, "num_kv_heads", None, 1),
            qkv_bias=flag(spec, "qkv_bias", False),
            window_size=number(spec, "window_size", None, 1),
            rope_theta=number(spec, "rope_theta", 10000.0, 1.0),
            max_length=number(archive.config, "max_position_embeddings", 2048, 1),
        )
        found |= dict.fromkeys(layers, mixer)
    if len(found) == num_layers and found:
        complaints.add(RangeError, "attn in config.json", "some of the layers", "all of them")
        complaints.raise_any()
    return found


def refuses(config: Config) -> str | None:
    """Why this layout does not support a model, or None."""
    mixer, channel = _recurrent(config), config.channels[0]
    deltas = [made for made, *_ in fla_delta.KINDS.values()]
    kinds: dict[type, type] = dict.fromkeys((GLAConfig, RetentionConfig, *deltas), SwiGLUConfig)
    kinds |= {RWKV6Config: RWKV6ChannelConfig, RWKV7Config: RWKV7ChannelConfig}
    if type(mixer) not in kinds or type(channel) is not kinds[type(mixer)]:
        return "it holds GLA, RetNet and the delta rule with gated feed-forward layers, RWKV-6 and RWKV-7"
    attention = {one for one in config.mixers if type(one) is SoftmaxAttentionConfig}
    if any(one != mixer and one not in attention for one in config.mixers) or any(one != channel for one in config.channels):
        return "all its layers have the same sizes, except for those of softmax attention"
    if attention and isinstance(mixer, RWKV6Config | RWKV7Config):
        return "its hybrids are of GLA, RetNet and the delta rule"
    if any(one.qk_norm or one.head_dim or one.rope_theta is None for one in attention) or len({one.max_length for one in attention}) > 1:
        return "its softmax attention has rotary embeddings, no norms, heads of hidden_size / num_heads and one max_length"
    if isinstance(mixer, RWKV7Config):
        assert isinstance(channel, RWKV7ChannelConfig)
        return rwkv7.fla_refuses(config, mixer, channel)
    if isinstance(mixer, RWKV6Config):
        if mixer.tuned_state:
            return "its sequences begin with states of zeros"
        return None if config.norm == "layer_norm" else "its RWKV-6 has layer norms"
    assert isinstance(mixer, HeadsConfig | DeltaConfig)
    normed = isinstance(mixer, DeltaConfig) or mixer.use_output_norm
    if config.norm != "rms_norm" or config.embedding_norm or mixer.norm_eps != config.norm_eps or not normed:
        return "all its norms are RMS norms of one eps, also of outputs but not of embeddings"
    if isinstance(mixer, DeltaConfig):
        return fla_delta.refuses(mixer)
    if isinstance(mixer, GLAConfig) and mixer.gate_logit_normalizer != 16:
        return "it divides decays by 16"
    if mixer.conv_bias:
        return "its convolutions have no bias"
    if isinstance(mixer, RetentionConfig) and (mixer.conv_size or mixer.rope_theta != 10000):
        return "its RetNet has no convolutions and a rope_theta of 10000"
    return None


def _recurrent(config: Config) -> MixerConfig | None:
    """The first mixer that is not softmax attention."""
    return next((one for one in config.mixers if type(one) is not SoftmaxAttentionConfig), None)


def _attention_specs(config: Config) -> dict[str, Any]:
    """``attn`` of config.json, which describes layers of softmax attention."""
    specs: dict[SoftmaxAttentionConfig, list[int]] = {}
    for n, one in enumerate(config.mixers):
        if isinstance(one, SoftmaxAttentionConfig):
            specs.setdefault(one, []).append(n)
    if not specs:
        return {"attn": None}
    names = ATTENTION - {"layers"}
    found = [{"layers": layers, **{name: getattr(one, name) for name in sorted(names)}} for one, layers in specs.items()]
    return {"attn": found[0] if len(found) == 1 else found, "max_position_embeddings": next(iter(specs)).max_length}


def stored(config: Config) -> dict[str, Any]:
    """config.json of fla."""
    mixer, channel = _recurrent(config), config.channels[0]
    assert isinstance(channel, SwiGLUConfig | RWKV6ChannelConfig | RWKV7ChannelConfig)
    found = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": channel.intermediate_size,
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        **_attention_specs(config),
    }
    if config.rescale_every != (RESCALE_EVERY if isinstance(mixer, RWKV6Config) else 0):
        found["rescale_every"] = config.rescale_every
    if isinstance(mixer, RWKV7Config):
        return found | rwkv7.fla_stored(config, mixer)
    if isinstance(mixer, RWKV6Config):
        V = mixer.head_size
        heads, K = mixer.num_heads or config.hidden_size // V, mixer.key_size or V
        return found | {
            "model_type": "rwkv6",
            "architectures": ["RWKV6ForCausalLM"],
            "num_heads": heads,
            "expand_k": heads * K / config.hidden_size,
            "expand_v": heads * V / config.hidden_size,
            "proj_low_rank_dim": mixer.mix_rank,
            "gate_low_rank_dim": mixer.decay_rank,
            "hidden_act": "sqrelu",
            "norm_first": config.embedding_norm,
            "norm_bias": config.norm_bias,
            "group_norm_eps": mixer.norm_eps,
        }
    if isinstance(mixer, DeltaConfig):
        return found | fla_delta.stored(mixer)
    assert isinstance(mixer, HeadsConfig)
    names = {here: theirs for theirs, here in FEATURE_MAPS.items()}
    gla = isinstance(mixer, GLAConfig)
    return (
        found
        | {
            "model_type": "gla" if gla else "retnet",
            "architectures": ["GLAForCausalLM" if gla else "RetNetForCausalLM"],
            "num_heads": mixer.num_heads,
            "num_kv_heads": mixer.num_kv_heads,
            "expand_k": mixer.expand_k,
            "expand_v": mixer.expand_v,
            "feature_map": names.get(mixer.feature_map or "", mixer.feature_map),
            "use_short_conv": mixer.conv_size > 0,
            "conv_size": mixer.conv_size or 4,
            "use_output_gate": mixer.use_output_gate,
            "elementwise_affine": mixer.elementwise_affine,
            "fuse_norm": mixer.use_output_gate,
            "hidden_act": "swish",
        }
        | ({"clamp_min": mixer.clamp_min} if isinstance(mixer, GLAConfig) else {})
    )


FLA = Format(
    name="fla",
    title="fla's layout",
    recognises=lambda archive: archive.depth("model.layers.") > 0 and archive.has("model.layers.{}.attn_norm.weight"),
    config=config_of,
    rows=rows,
    refuses=refuses,
    stored=stored,
    ignored=("lm_head.weight", ".rotary.inv_freq", *rwkv7.FLA_UNUSED),
)
