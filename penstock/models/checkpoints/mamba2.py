"""Mamba-2: the layout of transformers, and the files of state-spaces, which have another config.json."""

from __future__ import annotations

from typing import Any

from ...errors import Complaints, RangeError, described
from ...layers import Mamba2Config
from ..config import Config
from .archive import Archive
from .layout import Format, Row, check_told, common, divided, flag, needed, norms, number, same, tied

MIXER = ("A_log", "D", "dt_bias", "in_proj.weight", "conv1d.weight", "norm.weight", "out_proj.weight")


def rows(config: Config, archive: Archive | None = None) -> list[Row]:
    """The tensors of a model of these sizes."""
    mixer = config.mixers[0]
    assert isinstance(mixer, Mamba2Config)
    biases = ["conv1d.bias"] * mixer.use_conv_bias + ["in_proj.bias", "out_proj.bias"] * mixer.use_bias
    found = common(config, "backbone.norm_f", "lm_head.weight", _embeddings(archive))
    for n in range(config.num_layers):
        ours, theirs = f"layers.{n}.", f"backbone.layers.{n}."
        found += norms(config, f"{ours}mixer_norm", f"{theirs}norm")
        found += [same(f"{ours}mixer.{one}", f"{theirs}mixer.{one}") for one in (*MIXER, *biases)]
    return found


def _embeddings(archive: Archive | None) -> str:
    """The name of the embeddings: state-spaces' files, whose config.json has ``n_layer``, have another."""
    ours, old = "backbone.embeddings.weight", "backbone.embedding.weight"
    if archive is None or archive.has(ours):
        return ours
    return old if archive.has(old) or "n_layer" in archive.config else ours


def config_of(archive: Archive) -> Config:
    """The sizes. Shapes do not tell the number of groups, so there must be a config.json."""
    stored, complaints = archive.config, Complaints("load")
    mixing = "backbone.layers.{}.mixer."
    if not archive.has(f"{mixing}A_log") or not archive.has(f"{mixing}dt_bias"):
        complaints.add(
            RangeError, "path", "a checkpoint of a supported architecture", "another one, perhaps Mamba-1", "Mamba-2 is supported."
        )
        complaints.raise_any()
    needed(archive, "Mamba-2")
    layer = stored.get("ssm_cfg", {})
    if not isinstance(layer, dict):
        complaints.add(RangeError, "ssm_cfg in config.json", "an object", described(layer))
        complaints.raise_any()
    if layer.get("layer", "Mamba2") != "Mamba2":
        complaints.add(RangeError, "ssm_cfg", "that of Mamba2", layer["layer"])
    if stored.get("attn_layer_idx") or stored.get("d_intermediate"):
        complaints.add(RangeError, "config.json", "that of a model of Mamba-2 layers only", "one with attention or feed-forward layers")
    if stored.get("rms_norm", True) is not True or stored.get("hidden_act", "silu") not in ("silu", "swish"):
        complaints.add(RangeError, "config.json", "that of a model with RMS norms and silu", "another norm or activation")
    complaints.raise_any()

    embeddings = _embeddings(archive)
    vocab_size, hidden_size = archive.shape(embeddings, "V C")
    (heads,) = archive.shape(f"{mixing}A_log", "H")
    (inner,) = archive.shape(f"{mixing}norm.weight", "I")
    mixed, _, width = archive.shape(f"{mixing}conv1d.weight", "M 1 W")
    if not stored.keys() & {"n_groups"}:  # the projects' own defaults
        archive.config["n_groups"] = layer.get("ngroups", 8 if "num_hidden_layers" in stored else 1)
    groups = number(archive.config, "n_groups", 1, 1)
    state_size, head_dim = divided(mixed - inner, 2 * groups, "twice n_groups"), divided(inner, heads, f"{mixing}A_log")
    for values, names in ((stored, ("state_size", "head_dim", "num_heads")), (layer, ("d_state", "headdim", "nheads"))):
        for name, found in zip(names, (state_size, head_dim, heads)):
            check_told(values, name, found)
    eps = number(archive.config, "layer_norm_epsilon", 1e-5, 0.0)
    mixer = Mamba2Config(
        heads,
        head_dim=head_dim,
        state_size=state_size,
        n_groups=groups,
        conv_kernel=width,
        use_conv_bias=flag(stored, "use_conv_bias", archive.has(f"{mixing}conv1d.bias")),
        use_bias=flag(stored, "use_bias", archive.has(f"{mixing}in_proj.bias") or archive.has(f"{mixing}out_proj.bias")),
        time_step_limit=_limits(complaints, stored.get("time_step_limit", layer.get("dt_limit"))),
        norm_eps=eps,
    )
    tie = flag(archive.config, "tie_word_embeddings", flag(archive.config, "tie_embeddings", "n_layer" in stored))
    return Config(
        vocab_size,
        hidden_size,
        archive.depth("backbone.layers."),
        mixer,
        norm="rms_norm",
        norm_eps=eps,
        tie_embeddings=tied(archive, tie, embeddings, "lm_head.weight"),
        residual_in_float32=flag(archive.config, "residual_in_fp32", True),
        rescale_every=number(archive.config, "rescale_every", 0, 0),
    )


def _limits(complaints: Complaints, value: Any) -> tuple[float, float]:
    """Limits of dt."""
    if value is None:
        return 0.0, float("inf")
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(one, int | float) for one in value):
        complaints.add(RangeError, "time_step_limit in config.json", "two numbers", described(value))
        complaints.raise_any()
    return float(value[0]), float(value[1])


def refuses(config: Config) -> str | None:
    """Why this layout does not support a model, or None."""
    mixer = config.mixers[0]
    if type(mixer) is not Mamba2Config or any(one is not None for one in config.channels):
        return "it holds Mamba-2 layers only"
    if any(one != mixer for one in config.mixers):
        return "all its layers have the same sizes"
    if config.norm != "rms_norm" or config.embedding_norm or mixer.norm_eps != config.norm_eps:
        return "all its norms are RMS norms of one eps, and embeddings have none"
    if mixer.num_heads * mixer.head_dim % config.hidden_size:
        return "its layers are wider by a whole factor"
    return None


def stored(config: Config) -> dict[str, Any]:
    """config.json of transformers."""
    mixer = config.mixers[0]
    assert isinstance(mixer, Mamba2Config)
    return {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_heads": mixer.num_heads,
        "head_dim": mixer.head_dim,
        "state_size": mixer.state_size,
        "n_groups": mixer.n_groups,
        "expand": mixer.num_heads * mixer.head_dim // config.hidden_size,
        "conv_kernel": mixer.conv_kernel,
        "use_bias": mixer.use_bias,
        "use_conv_bias": mixer.use_conv_bias,
        "hidden_act": "silu",
        "layer_norm_epsilon": config.norm_eps,
        "residual_in_fp32": config.residual_in_float32,
        "time_step_limit": list(mixer.time_step_limit),
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        **({"rescale_every": config.rescale_every} if config.rescale_every else {}),
    }


MAMBA2 = Format(
    name="hf",
    title="the layout of Mamba-2 in transformers",
    recognises=lambda archive: archive.depth("backbone.layers.") > 0,
    config=config_of,
    rows=rows,
    refuses=refuses,
    stored=stored,
    ignored=("lm_head.weight",),
)
