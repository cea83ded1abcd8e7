"""flash-linear-attention's layout of DeltaNet, gated DeltaNet and Kimi delta attention: their mixers; ``fla`` has the rest."""

from __future__ import annotations

from typing import Any

from ...errors import Complaints, RangeError
from ...layers import DeltaNetConfig, GatedDeltaNetConfig, KDAConfig
from ...layers.delta_heads import DeltaConfig
from .archive import Archive
from .layout import Row, check_told, divided, flag, number, same

KINDS: dict[str, tuple[type[DeltaConfig], str, int]] = {
    "delta_net": (DeltaNetConfig, "DeltaNetForCausalLM", 16),
    "gated_deltanet": (GatedDeltaNetConfig, "GatedDeltaNetForCausalLM", 6),
    "kda": (KDAConfig, "KDAForCausalLM", 16),
}
"""By ``model_type``: the configuration of a mixer, the class of the model, and the default of ``num_heads``."""
MIXING = "model.layers.{}.attn."
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
ACTIVATIONS = {"silu": "silu", "relu": "relu", "elu": "elu+1", "identity": "identity"}
"""Of q and k, by their names in fla."""
NORMS = {"l2": "l2", "sum": "sum"}
GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
"""Of the output, likewise."""


def rows(mixer: DeltaConfig, ours: str, theirs: str) -> list[Row]:
    """The tensors of a mixer."""
    names = [f"{one}.weight" for one in PROJECTIONS]
    for one in CONVOLUTIONS if mixer.conv_size else ():
        names += [f"{one}.weight"] + [f"{one}.bias"] * mixer.conv_bias
    if isinstance(mixer, DeltaNetConfig):
        names += ["b_proj.weight"] * mixer.use_beta + ["g_proj.weight"] * mixer.use_gate
    elif isinstance(mixer, GatedDeltaNetConfig):
        names += ["a_proj.weight", "b_proj.weight", "A_log", "dt_bias"] + ["g_proj.weight"] * mixer.use_gate
    else:
        names += ["f_proj.0.weight", "f_proj.1.weight", "b_proj.weight", "A_log", "dt_bias"]
        names += ["g_proj.0.weight", "g_proj.1.weight", "g_proj.1.bias"]
    return [same(ours + one, theirs + one) for one in names] + [same(f"{ours}norm.weight", f"{theirs}o_norm.weight")]


def mixer_of(archive: Archive, kind: str, hidden_size: int, layers: list[int]) -> DeltaConfig:
    """The sizes of the mixers of these layers."""
    stored, (_, _, default) = archive.config, KINDS[kind]
    keys, _ = archive.shape(f"{MIXING}q_proj.weight", "GK C", layers)
    _, values = archive.shape(f"{MIXING}o_proj.weight", "C HV", layers)
    heads = number(stored, "num_heads", default, 1)
    shape: dict[str, Any] = {
        "num_heads": heads,
        "conv_size": 0,
        "conv_bias": archive.has(f"{MIXING}q_conv1d.bias"),
        "allow_neg_eigval": flag(stored, "allow_neg_eigval", False),
        "norm_eps": number(stored, "norm_eps", 1e-6, 0.0),
    }
    if flag(stored, "use_short_conv", archive.has(f"{MIXING}q_conv1d.weight")):
        shape["conv_size"] = archive.shape(f"{MIXING}q_conv1d.weight", "GK 1 W", layers)[2]
    gated = archive.has(f"{MIXING}g_proj.weight")
    if kind == "delta_net":
        check_told(stored, "expand_k", keys / hidden_size, hidden_size)
        check_told(stored, "expand_v", values / hidden_size, hidden_size)
        return DeltaNetConfig(
            **shape, expand_k=keys / hidden_size, expand_v=values / hidden_size, use_gate=flag(stored, "use_gate", gated),
            use_beta=flag(stored, "use_beta", archive.has(f"{MIXING}b_proj.weight")),
            qk_activation=_named(stored, "qk_activation", "silu", ACTIVATIONS), qk_norm=_named(stored, "qk_norm", "l2", NORMS),
        )  # fmt: skip
    value_heads, _ = archive.shape(f"{MIXING}b_proj.weight", "H C", layers)
    K, V = divided(keys, heads, "num_heads in config.json"), divided(values, value_heads, f"rows of {MIXING}b_proj.weight")
    for name, found, size in (("head_dim", K, 1), ("num_v_heads", value_heads, 1), ("expand_v", V / K, K)):
        check_told(stored, name, found, size, f" of {heads} heads")
    shape |= {"head_dim": K, "num_v_heads": None if value_heads == heads else value_heads, "expand_v": V / K}
    if kind == "gated_deltanet":
        activation = _named(stored, "output_gate_activation", "swish", GATES)
        return GatedDeltaNetConfig(**shape, use_gate=flag(stored, "use_gate", gated), gate_activation=activation)
    rank, _ = archive.shape(f"{MIXING}f_proj.0.weight", "R C", layers)
    return KDAConfig(**shape, gate_low_rank_dim=None if rank == V else rank, lower_bound=number(stored, "lower_bound", None))


def _named(stored: dict[str, Any], name: str, default: str, known: dict[str, str]) -> Any:
    """The name here of a value of config.json that is one of these names."""
    value = stored.get(name, default)
    if not isinstance(value, str) or value not in known:
        complaints = Complaints("load")
        complaints.add(RangeError, f"{name} in config.json", f"one of {', '.join(known)}", repr(value))
        complaints.raise_any()
    return known[value]


def refuses(mixer: DeltaConfig) -> str | None:
    """Why the layout does not support a mixer, or None."""
    if mixer.conv_bias:
        return "its convolutions have no bias"
    if isinstance(mixer, KDAConfig) and mixer.gate_low_rank_dim not in (None, mixer.heads(1).V):
        return "the rank of its gates is the size of a head of values"
    return None


def stored(mixer: DeltaConfig) -> dict[str, Any]:
    """The fields of config.json that describe a mixer."""
    kind = next(name for name, (made, *_) in KINDS.items() if type(mixer) is made)
    found = {
        "model_type": kind,
        "architectures": [KINDS[kind][1]],
        "num_heads": mixer.num_heads,
        "use_short_conv": mixer.conv_size > 0,
        "conv_size": mixer.conv_size or 4,
        "allow_neg_eigval": mixer.allow_neg_eigval,
        "hidden_act": "swish",
    }
    if isinstance(mixer, DeltaNetConfig):
        names = {here: theirs for theirs, here in ACTIVATIONS.items()}
        same_names = ("expand_k", "expand_v", "use_beta", "use_gate", "qk_norm")
        return found | {name: getattr(mixer, name) for name in same_names} | {"qk_activation": names[mixer.qk_activation]}
    assert isinstance(mixer, GatedDeltaNetConfig | KDAConfig)
    found |= {name: getattr(mixer, name) for name in ("head_dim", "num_v_heads", "expand_v")}
    if isinstance(mixer, GatedDeltaNetConfig):
        activation = "swish" if mixer.gate_activation == "silu" else mixer.gate_activation
        return found | {"use_gate": mixer.use_gate, "output_gate_activation": activation}
    return found | {"lower_bound": mixer.lower_bound, "safe_gate": mixer.lower_bound is not None and mixer.lower_bound >= -5}
