"""llama.cpp's layout of RWKV-6 and RWKV-7 in GGUF files, which are only read. Low-rank weights are stored [rank,inputs]."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import Complaints, RangeError
from ...layers import RWKV6ChannelConfig, RWKV6Config, RWKV7ChannelConfig, RWKV7Config
from ..config import Config
from . import rwkv7
from .archive import Archive
from .layout import Format, Row, common, divided, flat, norms, number, same, transposed

ARCHITECTURES = ("rwkv6", "rwkv7")
MAPS = ("receptance", "key", "value")
FUSED = "time_mix_lerp_fused.weight"
UNUSED = tuple(f"blk.0.time_mix_v{one}.weight" for one in range(3))
"""llama.cpp's converter writes other weights of layer 0 under these names."""


def config_of(archive: Archive) -> Config:
    """The sizes, from shapes and, of what they do not tell, from the metadata."""
    kind, complaints = archive.config.get("general.architecture"), Complaints("load")
    if kind not in ARCHITECTURES:
        complaints.add(RangeError, "general.architecture of the file", "rwkv6 or rwkv7", repr(kind), "Other models are not read from GGUF.")
        complaints.raise_any()
    size = number(archive.config, f"{kind}.wkv.head_size", 64, 1)
    vocab_size, hidden_size = archive.shape("token_embd.weight", "V C")
    width, _ = archive.shape("blk.{}.channel_mix_key.weight", "F C")
    inner, _ = archive.shape("blk.{}.time_mix_key.weight", "A C")
    heads = divided(inner, size, f"{kind}.wkv.head_size of the file")
    count = None if inner == hidden_size else heads
    mixer: RWKV6Config | RWKV7Config
    channel: RWKV6ChannelConfig | RWKV7ChannelConfig
    if kind == "rwkv6":
        _, _, rank = archive.shape("blk.{}.time_mix_w2.weight", "5 C M")
        decay_rank, _ = archive.shape("blk.{}.time_mix_decay_w1.weight", "D C")
        mixer, channel = RWKV6Config(size, num_heads=count, mix_rank=rank, decay_rank=decay_rank), RWKV6ChannelConfig(width)
    else:
        layers = archive.depth("blk.")
        ranks = [_rank(archive, one, range(one == "v", layers)) for one in rwkv7.LOW_RANK]
        decay, rate, value, gate = (default if rank is None else rank for rank, default in zip(ranks, (64, 64, 32, 128)))
        mixer, channel = RWKV7Config(size, count, decay, rate, value, gate), RWKV7ChannelConfig(width)
    eps = number(archive.config, f"{kind}.attention.layer_norm_epsilon", 1e-5, 0.0)
    return Config(
        vocab_size, hidden_size, archive.depth("blk."), mixer, channel, norm="layer_norm",
        norm_eps=float(f"{eps:.7g}"), embedding_norm=True,  # stored as float32
        rescale_every=_rescale_every(archive),
    )  # fmt: skip


def _rank(archive: Archive, letter: str, layers: range) -> int | None:
    """The rank of a low-rank map. A model of one layer has none of "v"."""
    return archive.shape(f"blk.{{}}.time_mix_{letter}1.weight", "D C", layers)[0] if layers else None


def _rescale_every(archive: Archive) -> int:
    """After how many layers a file's weights, and in float16 the residual stream, are divided by 2; 0: never."""
    kind = archive.config.get("general.architecture")
    found: int = number(archive.config, f"{kind}.rescale_every_n_layers", 0, 0)
    return found


def rows(config: Config, archive: Archive | None) -> list[Row]:
    """The tensors of a model of these sizes."""
    assert archive is not None
    found = common(config, "output_norm", "output.weight", "token_embd.weight", "token_embd_norm")
    for n, mixer in enumerate(config.mixers):
        ours, theirs = f"layers.{n}.", f"blk.{n}."
        found += norms(config, f"{ours}mixer_norm", f"{theirs}attn_norm") + norms(config, f"{ours}channel_norm", f"{theirs}attn_norm_2")
        found += [same(f"{ours}mixer.ln_x.{one}", f"{theirs}time_mix_ln.{one}") for one in ("weight", "bias")]
        found += [same(f"{ours}mixer.{one}.weight", f"{theirs}time_mix_{one}.weight") for one in MAPS]
        found.append(same(f"{ours}channel.key.weight", f"{theirs}channel_mix_key.weight"))
        divisor = 2 ** (n // config.rescale_every) if config.rescale_every else 1
        for name, other in (("mixer.output", "time_mix_output"), ("channel.value", "channel_mix_value")):
            found.append(_divided(f"{ours}{name}.weight", f"{theirs}{other}.weight", divisor))
        make = _rwkv7_rows if isinstance(mixer, RWKV7Config) else _rwkv6_rows
        found += make(n, archive, ours, theirs)
    return found


def _divided(ours: str, theirs: str, divisor: int) -> Row:
    """Stored divided by a power of 2."""
    if divisor == 1:
        return same(ours, theirs)
    return Row((ours,), (theirs,), lambda x: (x * divisor,), lambda x: (x / divisor,))


def _shifts(names: str, prefix: str, ours: str, theirs: str) -> Row:
    """Factors of token shifts, which are one tensor."""
    parts = tuple(f"{ours}mixer.{prefix}{one}" for one in names)
    read, write = (lambda x: x.reshape(len(parts), -1).unbind()), (lambda *x: (torch.stack([one.reshape(-1) for one in x]),))
    return Row(parts, (f"{theirs}{FUSED}",), read, write)


def _rwkv7_rows(n: int, archive: Archive, ours: str, theirs: str) -> list[Row]:
    found = [_shifts("rwkvag", "x_", ours, theirs), flat(f"{ours}channel.x_k", f"{theirs}channel_mix_lerp_k.weight")]
    found += [flat(f"{ours}mixer.{one}", f"{theirs}time_mix_{one}.weight") for one in ("k_k", "k_a", "r_k")]
    for one in rwkv7.low_rank(n):
        found += [transposed(f"{ours}mixer.{one}{part}", f"{theirs}time_mix_{one}{part}.weight") for part in (1, 2)]
        if one != "g":
            found.append(flat(f"{ours}mixer.{one}0", f"{theirs}time_mix_{one}0.weight"))
    return found


def _rwkv6_rows(n: int, archive: Archive, ours: str, theirs: str) -> list[Row]:
    found = [flat(f"{ours}channel.time_maa_{one}", f"{theirs}channel_mix_lerp_{one}.weight") for one in "kr"]
    apart = "x" if archive.has(f"blk.{{}}.{FUSED}") else "xwkvrg"  # early versions of llama.cpp have them apart
    found += [flat(f"{ours}mixer.time_maa_{one}", f"{theirs}time_mix_lerp_{one}.weight") for one in apart]
    if apart == "x":
        found.append(_shifts("wkvrg", "time_maa_", ours, theirs))
    found += [
        transposed(f"{ours}mixer.time_maa_w1", f"{theirs}time_mix_w1.weight"),
        Row((f"{ours}mixer.time_maa_w2",), (f"{theirs}time_mix_w2.weight",), _last_swapped, _last_swapped),
        *(transposed(f"{ours}mixer.time_decay_{one}", f"{theirs}time_mix_decay_{one}.weight") for one in ("w1", "w2")),
        flat(f"{ours}mixer.time_decay", f"{theirs}time_mix_decay.weight"),
        same(f"{ours}mixer.time_faaaa", f"{theirs}time_mix_first.weight"),
        same(f"{ours}mixer.gate.weight", f"{theirs}time_mix_gate.weight"),
        same(f"{ours}channel.receptance.weight", f"{theirs}channel_mix_receptance.weight"),
    ]
    return found


def _last_swapped(x: Tensor) -> tuple[Tensor]:
    return (x.transpose(-2, -1),)


GGUF = Format(
    name="gguf",
    title="GGUF of llama.cpp",
    recognises=lambda archive: "general.architecture" in archive.config and not archive.depth("layers."),
    config=config_of,
    rows=rows,
    refuses=lambda config: "it is only read",
    stored=None,
    ignored=UNUSED,
)
