"""Hugging Face classes: ``CausalLM`` as a ``PreTrainedModel`` for transformers' ``generate``, ``Trainer`` and Auto classes.

Importing this module registers them. ``AutoModelForCausalLM.from_pretrained`` and ``AutoModel.from_pretrained`` then load folders that
``penstock.models.save`` or ``save_pretrained`` wrote and, where transformers has no class of its own, the public layouts of RWKV-5,
RWKV-6, RWKV-7, GLA, RetNet, DeltaNet, gated DeltaNet and KDA:

>>> import torch
>>> from penstock.models import CausalLM, gla
>>> from penstock.models.huggingface import PenstockForCausalLM
>>> model = PenstockForCausalLM.of(CausalLM(gla(vocab_size=11, hidden_size=16, num_layers=1, num_heads=2)))
>>> model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=5, do_sample=False).shape
torch.Size([1, 8])

Hooks, wrappers and replaced ``forward``s of every module act in every call, with a cache and without.

Needs the extra ``transformers``: ``pip install -e ".[transformers]"`` in a checkout.
"""

from __future__ import annotations

from ...errors import MissingExtra

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise MissingExtra.of("penstock.models.huggingface", "transformers", "transformers") from error

from .cache import CACHE, StateCache
from .causal_lm import PenstockForCausalLM
from .configuration import PenstockConfig
from .model import PenstockModel
from .pretrained import PenstockPreTrainedModel

__all__ = ["CACHE", "PUBLIC_TYPES", "PenstockConfig", "PenstockForCausalLM", "PenstockModel", "PenstockPreTrainedModel", "StateCache"]

PUBLIC_TYPES = ("rwkv5", "rwkv6", "rwkv7", "gla", "retnet", "delta_net", "gated_deltanet", "kda")
"""Model types of public folders that transformers has no class for."""


def _register() -> None:
    classes = {AutoModel: PenstockModel, AutoModelForCausalLM: PenstockForCausalLM}
    AutoConfig.register(PenstockConfig.model_type, PenstockConfig)
    for auto, kind in classes.items():
        auto.register(PenstockConfig, kind)
    # by this table the Trainer shifts the labels of smoothed losses, and pipelines and lm_eval know the classes that generate
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[PenstockConfig.model_type] = PenstockForCausalLM.__name__
    for name in PUBLIC_TYPES:
        if name in CONFIG_MAPPING:  # another project's, such as fla's
            continue
        values, kind_of = {"model_type": name, "auto_map": {}, "__module__": __name__}, name.title().replace("_", "")
        config = type(f"Penstock{kind_of}Config", (PretrainedConfig,), values)
        globals()[config.__name__] = config  # where pickle looks for it
        AutoConfig.register(name, config)
        for auto, kind in classes.items():
            ending = kind.__name__.removeprefix("Penstock")
            model = type(f"Penstock{kind_of}{ending}", (kind,), {"config_class": config, "__module__": __name__})
            auto.register(config, model)


_register()
