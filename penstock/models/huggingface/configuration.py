"""The configuration of the Hugging Face classes."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

from transformers import PretrainedConfig

from ..causal_lm import CausalLM
from ..config import Config
from .hub import OPTIONS, SIZES, Arguments


class PenstockConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """The configuration of ``PenstockForCausalLM``.

    model : dict
        ``Config.to_dict()``.
    fuse_loss : bool
        In training, compute the loss without the logits of all tokens in memory; the output then has no logits.
    use_cache : bool
        Whether calls in evaluation mode without labels return a state.
    bos_token_id, eos_token_id, pad_token_id : int, optional
        The tokenizer's tokens, for ``generate`` and trainers.
    """

    model_type = "penstock"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    auto_map: ClassVar[dict[str, str]] = {}
    """No code comes with a folder."""

    def __init__(
        self, model: dict[str, Any] | None = None, fuse_loss: bool = False, use_cache: bool = True, bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None, pad_token_id: int | None = None, **others: Any,
    ) -> None:  # fmt: skip
        self.model = dict(model or {})
        self.fuse_loss = fuse_loss
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        for name, size in SIZES.items():
            setattr(self, name, self.model.get(size))
            others.pop(name, None)
        others["tie_word_embeddings"] = bool(self.model.get("tie_embeddings", False))
        super().__init__(**others)

    @property
    def _attn_implementation(self) -> str:
        """Of transformers, which would ask for its own attention. The layers have theirs."""
        return "eager"

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        self._attn_implementation_internal = "eager"

    def describe(self, config: Config) -> None:
        """Set the sizes of the model."""
        self.model, self.tie_word_embeddings = config.to_dict(), config.tie_embeddings
        for name, size in SIZES.items():
            setattr(self, name, self.model[size])

    @classmethod
    def of(cls, config: Config, **others: Any) -> PenstockConfig:
        """From the configuration of a ``CausalLM``."""
        return cls(config.to_dict(), architectures=["PenstockForCausalLM"], **others)


def config_of(model: CausalLM, given: Arguments, place: Path) -> PenstockConfig:
    """The configuration of a loaded model: that of its folder, or the one that was passed, with the options that were."""
    values = {} if given.config is not None else PretrainedConfig.get_config_dict(place)[0] if (place / "config.json").is_file() else {}
    stored = PenstockConfig.from_dict(values) if values.get("model_type") == PenstockConfig.model_type else given.config
    config = PenstockConfig.of(model.config)
    if isinstance(stored, PenstockConfig):
        config = deepcopy(stored)
        config.describe(model.config)
    for name in OPTIONS:  # other projects' configurations have some of these
        value = values.get(name) if stored is None else getattr(stored, name, None)
        if value is not None and not isinstance(stored, PenstockConfig) and name not in ("id2label", "label2id", "num_labels"):
            setattr(config, name, value)
    config.dtype = model.like().dtype
    given.override(config)
    return config
