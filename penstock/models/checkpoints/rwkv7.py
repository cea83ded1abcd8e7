"""RWKV-7: the tensors of BlinkDL's files, of web-rwkv's safetensors, which have the same names, and of fla's layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from ...errors import Complaints, RangeError
from ...layers import RWKV7AttentionConfig, RWKV7ChannelConfig, RWKV7Config
from ..config import Config
from .archive import DAMAGED, Archive
from .layout import Row, flat, number, same, transposed

SHIFTS = tuple(f"x_{one}" for one in "rwkvag")
LOW_RANK = "wavg"
"""The letters of low-rank maps: decay, in-context learning rate, layer 0's values, gate. The first layer has no "v", and "g" no bias."""
PLAIN = ("k_k", "k_a", "r_k", "receptance.weight", "key.weight", "value.weight", "output.weight", "ln_x.weight", "ln_x.bias")
CHANNEL = ("x_k", "key.weight", "value.weight")
DEEP_EMBED = ("s_emb.weight", "s_emb_x.weight", "s1", "s2", "s0")
"""Tensors of channel mixes with DeepEmbed (rwkv7a)."""
ATTENTION = (
    *("qq.weight", "k1", "k2", "v1", "v2", "k_emb.weight", "k_emb_x.weight", "v_emb.weight", "v_emb_x.weight"),
    *(f"x_{one}" for one in "qkv"), *(f"ln{one}.{part}" for one in "qkv" for part in ("weight", "bias")),
)  # fmt: skip
"""Tensors of attention beside the time mix (rwkv7b)."""
UNUSED = tuple(f"blocks.0.{mix}.v{one}" for mix in ("att", "attention") for one in range(3))
"""Weights of the first layer that some files have and no formula uses."""
FLA_UNUSED = tuple(f"model.layers.0.attn.v_lora.lora.{one}" for one in ("0.weight", "2.weight", "2.bias"))
FLA = {
    **{"r_k": "r_k", "receptance.weight": "r_proj.weight", "key.weight": "k_proj.weight", "value.weight": "v_proj.weight"},
    **{"output.weight": "o_proj.weight", "ln_x.weight": "g_norm.weight", "ln_x.bias": "g_norm.bias"},
}
"""fla's names of tensors that are stored as they are."""


def low_rank(layer: int) -> str:
    """The letters of the low-rank maps of a layer."""
    return LOW_RANK if layer else LOW_RANK.replace("v", "")


def blinkdl_rows(config: Config, layer: int, archive: Archive | None, name: Callable[[str], str]) -> list[Row]:
    """The tensors of one layer without its norms, in BlinkDL's names. Files of web-rwkv have swapped axes."""
    ours, theirs, mixer, channel = f"layers.{layer}.", f"blocks.{layer}.", config.mixers[layer], config.channels[layer]
    assert isinstance(mixer, RWKV7Config) and isinstance(channel, RWKV7ChannelConfig)  # noqa: PT018
    web = archive is not None and _by_web_rwkv(archive, name)
    biases = [f"{one}0" for one in low_rank(layer) if one != "g"]
    rows = [same(f"{ours}mixer.{one}", f"{theirs}att.{one}") for one in (*SHIFTS, *biases, *PLAIN)]
    for one in low_rank(layer):
        rows += [(transposed if web else same)(f"{ours}mixer.{one}{n}", f"{theirs}att.{one}{n}") for n in (1, 2)]
    if mixer.tuned_state:  # stored V x K
        names = (f"{ours}mixer.time_state",), (f"{theirs}att.time_state",)
        rows.append(Row(*names) if web else Row(*names, lambda x: (x.transpose(1, 2),), lambda x: (x.transpose(1, 2),)))
    if isinstance(mixer, RWKV7AttentionConfig):
        rows += [same(f"{ours}mixer.attention.{one}", f"{theirs}qkv.{one}") for one in ATTENTION]
    parts = CHANNEL if channel.embedding_rank is None else (*CHANNEL, *DEEP_EMBED)
    return rows + [same(f"{ours}channel.{one}", f"{theirs}ffn.{one}") for one in parts]


def _by_web_rwkv(archive: Archive, name: Callable[[str], str]) -> bool:
    """Whether low-rank weights are stored [rank,inputs]. A rank is less than the number of inputs."""
    (_, inputs), shape = archive.shape(name("emb.weight"), "V C"), archive.shape(name("blocks.{}.att.w1"), "C D")
    return shape[0] != inputs and shape[1] == inputs


def blinkdl_mixers(archive: Archive, name: Callable[[str], str]) -> tuple[RWKV7Config, RWKV7ChannelConfig]:
    """The sizes of the mixers of a file."""
    mixing, web = "blocks.{}.att.", _by_web_rwkv(archive, name)
    heads, size = archive.shape(name(f"{mixing}r_k"), "H n")
    ranks = {}
    for one in LOW_RANK:
        if archive.has(name(f"{mixing}{one}1")):
            ranks[one] = archive.shape(name(f"{mixing}{one}1"), "C D")[0 if web else 1]
    width, C = archive.shape(name("blocks.{}.ffn.key.weight"), "F C")
    tuned = archive.has(name(f"{mixing}time_state"))
    mixer = _mixer(heads, size, C, ranks, 64e-5, tuned)
    if any(archive.has(name(f"blocks.{{}}.qkv.{one}")) for one in ATTENTION):
        attention_size, _ = archive.shape(name("blocks.{}.qkv.qq.weight"), "A C")
        _, rank = archive.shape(name("blocks.{}.qkv.k1"), "C R")
        vocab_size, _ = archive.shape(name("emb.weight"), "V C")
        mixer = RWKV7AttentionConfig(**asdict(mixer), vocab_size=vocab_size, attention_size=attention_size, attention_rank=rank)
    return mixer, RWKV7ChannelConfig(width, *_deep_embed(archive, name))


def _deep_embed(archive: Archive, name: Callable[[str], str]) -> tuple[int, int] | tuple[()]:
    """``embedding_rank`` and ``vocab_size`` of channel mixes with DeepEmbed."""
    if not any(archive.has(name(f"blocks.{{}}.ffn.{one}")) for one in DEEP_EMBED):
        return ()
    _, rank = archive.shape(name("blocks.{}.ffn.s1"), "C E")
    vocab_size, _ = archive.shape(name("emb.weight"), "V C")
    return rank, vocab_size


def _mixer(heads: int, size: int, hidden_size: int, ranks: dict[str, int], eps: float, tuned: bool = False) -> RWKV7Config:
    count = None if heads * size == hidden_size else heads
    fields = {"w": "decay_rank", "a": "rate_rank", "v": "value_rank", "g": "gate_rank"}  # a model of one layer has no "v"
    return RWKV7Config(size, count, norm_eps=eps, tuned_state=tuned, **{fields[one]: rank for one, rank in ranks.items()})


def fla_rows(layer: int, archive: Archive | None, ours: str, theirs: str) -> list[Row]:
    """The tensors of one layer without its norms, in fla's names."""
    mixing, rows = f"{theirs}attn.", []
    if archive is not None and archive.has("model.layers.{}.attn.x_x"):  # early versions of fla
        parts = tuple(f"{ours}mixer.{one}" for one in SHIFTS)
        rows.append(Row(parts, (f"{mixing}x_x",), lambda x: x.unbind(), lambda *x: (torch.stack([one.reshape(-1) for one in x]),)))
    else:
        rows += [same(f"{ours}mixer.{one}", f"{mixing}{one}") for one in SHIFTS]
    for one in low_rank(layer):
        rows += [transposed(f"{ours}mixer.{one}{n}", f"{mixing}{one}_lora.lora.{part}.weight") for n, part in ((1, 0), (2, 2))]
        if one != "g":
            rows.append(flat(f"{ours}mixer.{one}0", f"{mixing}{one}_lora.lora.2.bias"))
    rows += [flat(f"{ours}mixer.{one}", f"{mixing}{one}") for one in ("k_k", "k_a")]
    rows += [same(f"{ours}mixer.{one}", f"{mixing}{other}") for one, other in FLA.items()]
    rows.append(flat(f"{ours}channel.x_k", f"{theirs}ffn.x_k"))
    return rows + [same(f"{ours}channel.{one}", f"{theirs}ffn.{one}") for one in CHANNEL[1:]]


def fla_config(archive: Archive, sizes: dict[str, Any]) -> Config:
    """The sizes of a folder in fla's layout."""
    mixing, complaints = "model.layers.{}.attn.", Complaints("load")
    heads, K = archive.shape(f"{mixing}r_k", "H K")
    inner, _ = archive.shape(f"{mixing}v_proj.weight", "A C")
    if inner != heads * K:
        rule = f"such that heads have as many values as keys: {heads * K} rows"
        complaints.add(RangeError, mixing.format(0) + "v_proj.weight", rule, inner, DAMAGED)
        complaints.raise_any()
    width, _ = archive.shape("model.layers.{}.ffn.key.weight", "F C")
    ranks = {}
    for one in LOW_RANK:
        if archive.has(f"{mixing}{one}_lora.lora.0.weight"):
            ranks[one], _ = archive.shape(f"{mixing}{one}_lora.lora.0.weight", "D C")
    eps = number(archive.config, "norm_eps", 1e-5, 0.0)
    return Config(
        mixer=_mixer(heads, K, sizes["hidden_size"], ranks, K * eps), channel=RWKV7ChannelConfig(width), norm="layer_norm",
        norm_eps=eps, norm_bias=archive.has("model.layers.{}.attn_norm.bias"),
        embedding_norm=any(archive.has(f"model.layers.{{}}.pre_norm.{one}") for one in ("weight", "bias")),
        rescale_every=number(archive.config, "rescale_every", 0, 0), **sizes,
    )  # fmt: skip


def fla_refuses(config: Config, mixer: RWKV7Config, channel: RWKV7ChannelConfig) -> str | None:
    """Why fla's layout does not support an RWKV-7, or None."""
    if channel.embedding_rank is not None:
        return "its channel mixes have no DeepEmbed"
    if mixer.tuned_state:
        return "its sequences begin with states of zeros"
    if config.norm != "layer_norm":
        return "its RWKV-7 has layer norms"
    if mixer.num_heads not in (None, config.hidden_size // mixer.head_size) or config.hidden_size % mixer.head_size:
        return "its heads have hidden_size channels together"
    if mixer.norm_eps != mixer.head_size * config.norm_eps:
        return f"its eps of ln_x is head_size * norm_eps = {mixer.head_size * config.norm_eps}, and this model's {mixer.norm_eps}"
    return None


def fla_stored(config: Config, mixer: RWKV7Config) -> dict[str, Any]:
    """What config.json of fla says of an RWKV-7 beside the sizes of every model."""
    return {
        "model_type": "rwkv7",
        "architectures": ["RWKV7ForCausalLM"],
        "attn_mode": "chunk",
        "head_dim": mixer.head_size,
        "num_heads": config.hidden_size // mixer.head_size,
        "value_dim": [config.hidden_size] * config.num_layers,
        "decay_low_rank_dim": mixer.decay_rank,
        "a_low_rank_dim": mixer.rate_rank,
        "v_low_rank_dim": mixer.value_rank,
        "gate_low_rank_dim": mixer.gate_rank,
        "hidden_act": "sqrelu",
        "norm_first": config.embedding_norm,
        "norm_bias": config.norm_bias,
        "fuse_norm": False,
    }
