"""RWKV-5, RWKV-6 and RWKV-7: BlinkDL's files, and the folders of the Hugging Face remote code, which rename the same tensors.

Sizes are read from shapes: those of config.json are wrong in published folders. Parameters of our mixers have BlinkDL's names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import Complaints, RangeError
from ...layers import (
    RWKV5ChannelConfig,
    RWKV5Config,
    RWKV6ChannelConfig,
    RWKV6Config,
    RWKV7AttentionConfig,
    RWKV7ChannelConfig,
    RWKV7Config,
)
from ..config import RESCALE_EVERY, Config
from . import rwkv7
from .archive import Archive
from .layout import Format, Row, common, divided, flat, norms, number, renamed, same

MIXER = ("receptance.weight", "key.weight", "value.weight", "output.weight", "ln_x.weight", "ln_x.bias", "time_decay", "time_faaaa")
GATE = ("gate.weight",)
RWKV5_MIXER = ("time_mix_k", "time_mix_v", "time_mix_r")
RWKV5_GATE = (*GATE, "time_mix_g")
RWKV6_MIXER = (
    *(f"time_maa_{one}" for one in ("x", "w", "k", "v", "r", "g", "w1", "w2")),
    *("time_decay_w1", "time_decay_w2"),
    *GATE,
)
CHANNEL = ("key.weight", "receptance.weight", "value.weight")
RWKV5_CHANNEL = (*CHANNEL, "time_mix_k", "time_mix_r")
RWKV6_CHANNEL = (*CHANNEL, "time_maa_k", "time_maa_r")
KINDS = {
    RWKV5Config: RWKV5ChannelConfig, RWKV6Config: RWKV6ChannelConfig, RWKV7Config: RWKV7ChannelConfig,
    RWKV7AttentionConfig: RWKV7ChannelConfig,
}  # fmt: skip
"""The channel mixer of each time mix."""
BLOCK = re.compile(r"blocks\.\d+\.(att|ffn|ln1|ln2)\.")
LONG = {"k": "key", "v": "value", "r": "receptance", "g": "gate"}
"""Endings of ``time_mix_`` in the remote code."""
VARIANT = "RWKV-6 of another variant than x060 (x060a, x060b or later)"
OTHERS = {
    "att.gate_w1": VARIANT,
    "att.time_maa_rkvw_w1": VARIANT,
    "att.time_maa_rkvw": VARIANT,
    "att.time_mix_w1": "RWKV-6 with the names of web-rwkv, which transposes weights",
}
"""Unsupported versions, each by a tensor that only it has."""


def blinkdl_rows(config: Config, archive: Archive | None = None, name: Callable[[str], str] = str) -> list[Row]:
    """The tensors of a model of these sizes; ``name`` maps BlinkDL's names to those of the file."""
    mixer = config.mixers[0]
    rows = common(config, "ln_out", "head.weight", "emb.weight", "blocks.0.ln0")
    for n in range(config.num_layers):
        ours, theirs = f"layers.{n}.", f"blocks.{n}."
        rows += norms(config, f"{ours}mixer_norm", f"{theirs}ln1") + norms(config, f"{ours}channel_norm", f"{theirs}ln2")
        if isinstance(mixer, RWKV7Config):
            rows += rwkv7.blinkdl_rows(config, n, archive, name)
            continue
        if isinstance(mixer, RWKV5Config):
            names, channel = (*MIXER, *RWKV5_MIXER, *(RWKV5_GATE if mixer.version != "5.0" else ())), RWKV5_CHANNEL
        else:
            names, channel = (*MIXER, *RWKV6_MIXER), RWKV6_CHANNEL
        rows += [same(f"{ours}mixer.{one}", f"{theirs}att.{one}") for one in names]
        rows += [same(f"{ours}channel.{one}", f"{theirs}ffn.{one}") for one in channel]
        if isinstance(mixer, RWKV6Config) and mixer.tuned_state:  # stored V x K
            rows.append(Row((f"{ours}mixer.time_state",), (f"{theirs}att.time_state",), _swapped, _swapped))
    if isinstance(mixer, RWKV5Config) and mixer.version != "5.2":
        old = archive is not None and archive.has(name("blocks.{}.att.time_first"))
        rows = [_of_heads(row, old) for row in rows]
    return renamed(rows, name)


def _swapped(x: Tensor) -> tuple[Tensor]:
    return (x.transpose(1, 2),)


def _of_heads(row: Row, old: bool) -> Row:
    """Before 5.2, decays and bonuses are one number per head [H]; in old files ``time_first`` is the logarithm of the bonus."""
    (ours,), (theirs,) = row.ours, row.theirs
    if old and theirs.endswith(".time_faaaa"):
        first = theirs.replace(".time_faaaa", ".time_first")
        return Row((ours,), (first,), lambda x: (torch.exp(x.double()),), lambda x: (torch.log(x.reshape(-1)),))
    return flat(ours, theirs) if theirs.endswith((".time_decay", ".time_faaaa")) else row


def hf_name(name: str) -> str:
    """A name of BlinkDL's in the remote code."""
    if name == "head.weight":
        return name
    name = re.sub(r"\.time_mix_([kvrg])$", lambda found: f".time_mix_{LONG[found[1]]}", name)
    name = re.sub(r"^emb\.", "embeddings.", name).replace("blocks.0.ln0.", "blocks.0.pre_ln.")
    return "rwkv." + name.replace(".att.", ".attention.").replace(".ffn.", ".feed_forward.")


def config_of(archive: Archive, name: Callable[[str], str] = str) -> Config:
    """The sizes of a file; ``name`` maps BlinkDL's names to those of the file."""
    mixing = "blocks.{}.att."
    _check_supported(archive, name)
    vocab_size, hidden_size = archive.shape(name("emb.weight"), "V C")
    width, _ = archive.shape(name("blocks.{}.ffn.key.weight"), "F C")
    mixer: RWKV5Config | RWKV6Config | RWKV7Config
    channel: RWKV5ChannelConfig | RWKV6ChannelConfig | RWKV7ChannelConfig
    if archive.has(name(f"{mixing}r_k")):
        mixer, channel = rwkv7.blinkdl_mixers(archive, name)
    elif archive.has(name(f"{mixing}time_maa_x")):
        heads, size = archive.shape(name(f"{mixing}time_faaaa"), "H n")
        _, rank, _ = archive.shape(name(f"{mixing}time_maa_w2"), "5 M C")
        _, decay_rank = archive.shape(name(f"{mixing}time_decay_w1"), "C D")
        count, tuned = _count(heads, size, hidden_size), archive.has(name(f"{mixing}time_state"))
        mixer = RWKV6Config(size, num_heads=count, mix_rank=rank, decay_rank=decay_rank, tuned_state=tuned)
        channel = RWKV6ChannelConfig(width)
    else:
        inner, _ = archive.shape(name(f"{mixing}key.weight"), "A C")
        heads, *rest = archive.shape(name(f"{mixing}time_decay"), "H ...")
        by_channel = any(one > 1 for one in rest)
        size = divided(inner, heads, f"heads of {name(f'{mixing}time_decay')}")
        version: Literal["5.0", "5.1", "5.2"] = "5.2" if by_channel else "5.1" if archive.has(name(f"{mixing}gate.weight")) else "5.0"
        mixer = RWKV5Config(size, num_heads=_count(heads, size, hidden_size), version=version)
        channel = RWKV5ChannelConfig(width)
    eps = number(archive.config, "layer_norm_epsilon", 1e-5, 0.0)
    usual = 0 if isinstance(mixer, RWKV7Config) else RESCALE_EVERY
    rescale_every = max(number(archive.config, "rescale_every", usual, -(2**63)), 0)
    layers = archive.depth(name("blocks.{}").removesuffix("{}"))
    return Config(
        vocab_size, hidden_size, layers, mixer, channel, norm="layer_norm", norm_eps=eps, embedding_norm=True, rescale_every=rescale_every
    )  # fmt: skip


def _count(heads: int, size: int, hidden_size: int) -> int | None:
    return None if heads * size == hidden_size else heads


def _check_supported(archive: Archive, name: Callable[[str], str]) -> None:
    complaints = Complaints("load")
    remedy = "Supported are RWKV-5.0, 5.1 and 5.2, RWKV-6 (x060) and RWKV-7 (x070, rwkv7a and rwkv7b)."
    found = {model: tensor for tensor, model in OTHERS.items() if archive.has(name(f"blocks.{{}}.{tensor}"))}
    if not found and not archive.has(name("blocks.{}.att.ln_x.weight")):
        found = {"RWKV-4 or older": "no att.ln_x.weight"}
    for model, tensor in found.items():
        complaints.add(RangeError, "path", "a checkpoint of a supported architecture", f"{model} ({tensor})", remedy)
    complaints.raise_any()


def refuses(config: Config) -> str | None:
    """Why these formats do not support a model, or None."""
    mixer = config.mixers[0]
    if type(mixer) not in KINDS or {type(one) for one in config.channels} != {KINDS[type(mixer)]}:
        return "it holds RWKV models only"
    assert isinstance(mixer, RWKV5Config | RWKV6Config | RWKV7Config)
    if any(one != mixer for one in config.mixers) or any(one != config.channels[0] for one in config.channels):
        return "all its layers have the same sizes"
    if isinstance(mixer, RWKV7AttentionConfig) and mixer.attention_norm_eps != 1e-5:
        return f"its eps of the norms of attention is 1e-5, and this model's {mixer.attention_norm_eps}"
    if isinstance(mixer, RWKV6Config) and mixer.key_size not in (None, mixer.head_size):
        return f"its heads have as many keys as values, and this model's {mixer.key_size} and {mixer.head_size}"
    if mixer.norm_eps != 64e-5:
        return f"its eps of ln_x is 64e-5, and this model's {mixer.norm_eps}"
    if config.norm != "layer_norm" or not (config.norm_eps == 1e-5 and config.norm_bias and config.embedding_norm):
        return "its norms, also that of embeddings, are layer norms with bias and eps 1e-5"
    return "its head is not that of the embeddings" if config.tie_embeddings else None


def hf_refuses(config: Config) -> str | None:
    """Why the remote code's folders do not support a model, or None."""
    mixer = config.mixers[0]
    if isinstance(mixer, RWKV5Config) and mixer.version != "5.2":
        return f"it holds RWKV-5.2 and RWKV-6, and this model is RWKV-{mixer.version}"
    if isinstance(mixer, RWKV7Config):
        return "it holds RWKV-5.2 and RWKV-6, and this model is RWKV-7, whose folders have fla's layout"
    return refuses(config)


def stored(config: Config) -> dict[str, Any]:
    """config.json of the remote code."""
    mixer, channel = config.mixers[0], config.channels[0]
    assert isinstance(mixer, RWKV5Config | RWKV6Config)
    assert isinstance(channel, RWKV5ChannelConfig | RWKV6ChannelConfig)
    number = 5 if isinstance(mixer, RWKV5Config) else 6
    code = f"RWKV/rwkv-{number}-world-1b{'5' if number == 5 else '6'}"
    model = "RwkvForCausalLM" if number == 5 else "Rwkv6ForCausalLM"
    return {
        "model_type": f"rwkv{number}",
        "architectures": [model],
        "auto_map": {
            "AutoConfig": f"{code}--configuration_rwkv{number}.Rwkv{number}Config",
            "AutoModelForCausalLM": f"{code}--modeling_rwkv{number}.{model}",
        },
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "attention_hidden_size": config.hidden_size,
        "intermediate_size": channel.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.hidden_size // mixer.head_size,
        "head_size": mixer.head_size,
        "head_size_divisor": 8,
        "layer_norm_epsilon": config.norm_eps,
        "rescale_every": config.rescale_every,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


BLINKDL = Format(
    name="blinkdl",
    title="BlinkDL's RWKV files",
    recognises=lambda archive: archive.depth("blocks.") > 0 and any(BLOCK.match(name) for name in archive.tensors),
    config=config_of,
    rows=blinkdl_rows,
    refuses=refuses,
    stored=None,
    ignored=rwkv7.UNUSED,
)
HF_RWKV = Format(
    name="hf",
    title="the Hugging Face layout of RWKV",
    recognises=lambda archive: archive.depth("rwkv.blocks.") > 0,
    config=lambda archive: config_of(archive, hf_name),
    rows=lambda config, archive: blinkdl_rows(config, archive, hf_name),
    refuses=hf_refuses,
    stored=stored,
    ignored=rwkv7.UNUSED,
)
