"""One small checkpoint in each public format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from . import delta, gla, mamba2, retnet, rwkv5, rwkv6, rwkv7, write_bin, write_pth, write_safetensors

ATTENTION = [
    {"layers": [1], "num_heads": 6, "num_kv_heads": 3, "qkv_bias": True, "window_size": 7, "rope_theta": 100.0},
    {"layers": [2], "num_heads": 4},
]


class Published(NamedTuple):
    """A checkpoint, its true logits, and where it may go."""

    write: Callable[[Path], Path]
    """Write it into a folder; returns the path to load."""
    logits: Callable[[Tensor], Tensor]
    """True logits [T,13] of one sequence [T], float64."""
    formats: tuple[str, ...]
    """The formats in which the model can be saved, beside Penstock's own."""


def _published() -> dict[str, Published]:
    found = {}
    for version in rwkv5.VERSIONS:
        w = rwkv5.draw(version)
        formats = ("blinkdl", "hf") if version == "5.2" else ("blinkdl",)
        found[f"blinkdl rwkv{version}"] = Published(partial(write_pth, w), partial(rwkv5.logits, w), formats)
    write = partial(write_safetensors, rwkv5.hf_names(w), rwkv5.hf_config(w))
    found["hf rwkv5.2"] = Published(write, partial(rwkv5.logits, w), ("blinkdl", "hf"))

    w, formats = rwkv6.draw(), ("blinkdl", "hf", "fla")
    found["blinkdl rwkv6"] = Published(partial(write_pth, w), partial(rwkv6.logits, w), formats)
    write = partial(write_bin, rwkv6.hf_names(w), rwkv6.hf_config(w), shards=3)
    found["hf rwkv6"] = Published(write, partial(rwkv6.logits, w), formats)
    w = rwkv6.with_time_state(w)
    found["blinkdl rwkv6 with states"] = Published(partial(write_pth, w), partial(rwkv6.logits, w), ("blinkdl", "hf"))
    w = rwkv6.draw_fla()
    write = partial(write_safetensors, w, rwkv6.fla_config(w, 1e-3))
    found["fla rwkv6"] = Published(write, partial(rwkv6.fla_logits, w, norm_eps=1e-3, group_norm_eps=1e-3), ("fla",))

    w, formats = rwkv7.draw(), ("blinkdl",)
    found["blinkdl rwkv7"] = Published(partial(write_pth, w), partial(rwkv7.logits, w), formats)
    first, tuned, wide = rwkv7.draw(first=True), rwkv7.with_time_state(w), rwkv7.draw(3, 64, 1)
    found["blinkdl rwkv7 with unused weights"] = Published(partial(write_pth, first), partial(rwkv7.logits, first), formats)
    found["blinkdl rwkv7 with states"] = Published(partial(write_pth, tuned), partial(rwkv7.logits, tuned), formats)
    found["blinkdl rwkv7 wide"] = Published(partial(write_pth, wide), partial(rwkv7.logits, wide), ("blinkdl", "fla"))
    deep = rwkv7.draw(deep=3)
    found["blinkdl rwkv7a"] = Published(partial(write_pth, deep), partial(rwkv7.logits, deep), formats)
    found["blinkdl rwkv7a of safetensors"] = Published(partial(rwkv7.write_st, deep), partial(rwkv7.logits, deep), formats)
    attending = rwkv7.draw(deep=3, attention=4)
    found["blinkdl rwkv7b"] = Published(partial(write_pth, attending), partial(rwkv7.logits, attending), formats)
    for name, one in {"": w, " with states": tuned}.items():
        found[f"web-rwkv rwkv7{name}"] = Published(partial(rwkv7.write_st, rwkv7.web_rwkv(one)), partial(rwkv7.logits, one), formats)
    write = partial(write_safetensors, rwkv7.hf_names(first), rwkv7.hf_config(first), shards=2)
    found["hf rwkv7"] = Published(write, partial(rwkv7.logits, first), formats)
    for name, fused, eps in (("rwkv7", False, 8e-5), ("early rwkv7", True, 1e-3)):
        true = partial(rwkv7.logits, w, norm_eps=eps, group_norm_eps=8 * eps)
        write = partial(write_safetensors, rwkv7.fla_names(w, fused), rwkv7.fla_config(w, eps))
        found[f"fla {name}"] = Published(write, true, ("fla",))
    write = partial(write_bin, rwkv7.fla_names(wide), rwkv7.fla_config(wide))
    found["fla rwkv7 wide"] = Published(write, partial(rwkv7.logits, wide), ("blinkdl", "fla"))

    for name, changes in {
        "gla": {},
        "gla shared": {"num_kv_heads": 1, "use_short_conv": True, "tie_word_embeddings": True, "feature_map": "swish"},
        "gla plain": {"use_output_gate": False, "elementwise_affine": False, "clamp_min": -0.03, "expand_k": 1, "expand_v": 2},
        "gla apart": {"fuse_norm": False, "feature_map": "relu"},
        "gla hybrid": {"num_hidden_layers": 3, "attn": ATTENTION},
    }.items():
        config = gla.config(**changes)
        w = gla.draw(config)
        write = partial(write_safetensors, w, config, shards=2)
        found[f"fla {name}"] = Published(write, partial(gla.logits, w, config), ("fla",))
    for name, changes, formats in (
        ("retnet", {}, ("fla",)),
        ("retnet shared", {"num_kv_heads": 1, "num_heads": 4, "hidden_size": 32}, ("fla",)),
        ("retnet hybrid", {"num_hidden_layers": 2, "attn": {"layers": [0], "num_heads": 6}}, ("fla",)),
        ("retnet convolved", {"use_short_conv": True}, ()),
    ):
        config = retnet.config(**changes)
        w = retnet.draw(config)
        found[f"fla {name}"] = Published(partial(write_safetensors, w, config), partial(retnet.logits, w, config), formats)

    for name, kind, changes in (
        ("delta_net", "delta_net", {}),
        ("delta_net plain", "delta_net", {"use_beta": False, "use_short_conv": False, "qk_activation": "relu", "allow_neg_eigval": True}),
        ("delta_net gated", "delta_net", {"use_gate": True, "qk_activation": "elu", "qk_norm": "sum", "expand_k": 0.5, "expand_v": 1.5}),
        ("delta_net signed sums", "delta_net", {"qk_activation": "identity", "qk_norm": "sum"}),
        ("gated_deltanet", "gated_deltanet", {"num_v_heads": 4, "expand_v": 1.0}),
        ("gated_deltanet plain", "gated_deltanet", {"use_gate": False, "allow_neg_eigval": True, "tie_word_embeddings": True}),
        ("gated_deltanet sigmoid", "gated_deltanet", {"output_gate_activation": "sigmoid", "use_short_conv": False}),
        ("gated_deltanet hybrid", "gated_deltanet", {"num_hidden_layers": 3, "attn": ATTENTION}),
        ("kda", "kda", {}),
        ("kda bounded", "kda", {"num_v_heads": 4, "expand_v": 2.0, "lower_bound": -5.0, "safe_gate": True}),
        ("kda hybrid", "kda", {"attn": {"layers": [0], "num_heads": 6}}),
    ):
        config = delta.config(kind, **changes)
        w = delta.draw(config)
        found[f"fla {name}"] = Published(partial(write_safetensors, w, config), partial(delta.logits, w, config), ("fla",))

    limits = {"time_step_limit": [0.1, 0.5], "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}
    for name, config in {"": mamba2.config(), " limited": mamba2.config(groups=1, eps=1e-3) | limits}.items():
        w = mamba2.draw(config)
        found[f"hf mamba2{name}"] = Published(partial(write_safetensors, w, config), partial(mamba2.logits, w, config), ("hf",))
    config = mamba2.config(groups=1) | {"tie_word_embeddings": True}
    w = mamba2.draw(config)
    write = partial(write_bin, mamba2.state_spaces_names(w), mamba2.state_spaces_config(config))
    found["state-spaces mamba2"] = Published(write, partial(mamba2.logits, w, config), ("hf",))
    return found


PUBLISHED = _published()
