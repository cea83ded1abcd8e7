"""Our own layout: the names of ``CausalLM``, with its ``Config`` as ``model`` of config.json.

transformers' classes put ``model.`` before the names of all but the head (``penstock.models.huggingface``), as other modules put their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ... import __version__
from ...errors import Complaints, DtypeError, PenstockError, RangeError, described
from ..causal_lm import CausalLM
from ..config import Config
from .archive import DAMAGED, Archive
from .layout import Format, Row, needed, same, tied


def rows(config: Config, archive: Archive | None = None) -> list[Row]:
    """The tensors of a model of these sizes."""
    with torch.device("meta"):
        names = CausalLM(config).state_dict()
    return [same(name, name) for name in names if not (config.tie_embeddings and name == "head.weight")]


def config_of(archive: Archive) -> Config:
    """The stored configuration."""
    needed(archive, "Penstock's models")
    found: Any = archive.config.get("model")
    complaints = Complaints("load")
    if not isinstance(found, dict):
        complaints.add(DtypeError, "model in config.json", "the configuration of a Penstock model", described(found))
        complaints.raise_any()
    layers = found.get("num_layers")
    if isinstance(layers, int) and layers > len(archive.tensors):
        complaints.add(RangeError, "num_layers in config.json", "that of the weights", layers, DAMAGED)
        complaints.raise_any()
    try:
        config = Config.from_dict(found)
        tie = tied(archive, config.tie_embeddings, "embeddings.weight", "head.weight")
        return config if tie == config.tie_embeddings else replace(config, tie_embeddings=tie)
    except (TypeError, ValueError) as error:  # also Python's errors for missing and unknown names
        if isinstance(error, PenstockError):
            raise
        complaints.add(RangeError, "model in config.json", "the configuration of a Penstock model", str(error))
        complaints.raise_any()
        raise


def stored(config: Config) -> dict[str, Any]:
    """config.json; transformers reads the sizes beside ``model``."""
    return {
        "model_type": "penstock",
        "architectures": ["PenstockForCausalLM"],
        "model": config.to_dict(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": config.tie_embeddings,
        "penstock_version": __version__,
    }


PENSTOCK = Format(
    name="penstock",
    title="Penstock's layout",
    recognises=lambda archive: archive.has("layers.{}.mixer_norm.weight"),
    config=config_of,
    rows=rows,
    refuses=lambda config: None,
    stored=stored,
    ignored=("head.weight",),
)
