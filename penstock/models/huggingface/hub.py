"""Arguments of transformers' ``from_pretrained``: the model, its location, and options of configurations."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import Complaints, DtypeError, RangeError, described
from ..causal_lm import CausalLM
from ..checkpoints import load, load_headless

FUNCTION = "from_pretrained"
HUB = ("revision", "cache_dir", "token", "local_files_only", "force_download")
"""Arguments about downloads."""
ADAPTER = "adapter_config.json"
"""The file of an adapter of PEFT."""
MEANINGLESS = (
    "attn_implementation", "code_revision", "experts_implementation", "low_cpu_mem_usage", "offload_buffers",
    "offload_folder", "offload_state_dict", "trust_remote_code", "use_kernels", "use_safetensors", "weights_only",
)  # fmt: skip
"""Arguments of transformers that change nothing here: a model is on one device, and code in files is never run."""
OPTIONS = (
    "bos_token_id", "eos_token_id", "fuse_loss", "id2label", "label2id", "num_labels", "output_hidden_states", "pad_token_id",
    "problem_type", "return_dict", "use_cache",
)  # fmt: skip
"""Options of configurations that change no weights."""
SIZES = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_layers"}
"""Names of sizes in configurations of transformers, and in ``Config``."""


@dataclass
class Arguments:
    """The arguments of ``from_pretrained``."""

    hub: dict[str, Any]
    dtype: torch.dtype | None
    device: torch.device | None
    config: Any = None
    subfolder: str = ""
    max_memory: dict[Any, Any] | None = None
    info: bool = False
    """Whether to return the names of tensors that did not fit."""
    options: dict[str, Any] = field(default_factory=dict)
    tied: bool | None = None
    adapter_name: str = "default"
    adapter_options: dict[str, Any] = field(default_factory=dict)

    def adapter(self, name: str) -> tuple[str | None, str]:
        """The folder or repository of an adapter of PEFT, and that of its model. Auto classes pass both, others ``name`` alone."""
        found = self.adapter_options.pop("_adapter_model_path", None)
        folder = Path(name) / self.subfolder
        if found is None and (folder / ADAPTER).is_file():
            if not (folder / "config.json").is_file():
                self.subfolder, name = "", json.loads((folder / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
            return str(folder), name
        return found, name

    def place(self, name: str) -> Path:
        """The file or folder of a checkpoint, downloaded if needed."""
        path = Path(name) if Path(name).exists() else downloaded(name, self.hub, self.subfolder)
        found = path / self.subfolder if self.subfolder else path
        if not found.exists():
            complaints = Complaints(FUNCTION)
            complaints.add(RangeError, "subfolder", f"a folder in {name!r}", repr(self.subfolder))
            complaints.raise_any()
        return found

    def load(self, place: Path, head: bool) -> CausalLM:
        """The model, checked against what was asked for. Without ``head``, it may be on the meta device."""
        model = (load if head else load_headless)(place, dtype=self.dtype, device=self.device)
        complaints = Complaints(FUNCTION)
        tied = self._asked_to_tie()
        if tied is False and model.config.tie_embeddings:
            model.config = replace(model.config, tie_embeddings=False)
            model.head.weight = nn.Parameter(model.head.weight.detach().clone(), model.head.weight.requires_grad)
        elif tied is not None and tied != model.config.tie_embeddings:
            complaints.add(RangeError, "tie_word_embeddings", f"{model.config.tie_embeddings}, as in the checkpoint", tied)
        for name, size in SIZES.items() if self._told else ():
            asked, found = getattr(self.config, name), getattr(model.config, size)
            if asked not in (self._told.get(size), found):
                complaints.add(RangeError, name, f"{found}, as in the checkpoint", described(asked))
        if self.max_memory is not None:
            self._check_memory(complaints, model)
        complaints.raise_any()
        return model

    @property
    def _told(self) -> dict[str, Any]:
        """``Config.to_dict()`` in the configuration. Auto classes have put options that contradict it beside it."""
        found = getattr(self.config, "model", None)
        return found if isinstance(found, dict) else {}

    def _asked_to_tie(self) -> bool | None:
        """``tie_word_embeddings``, if it was given."""
        told = self._told.get("tie_embeddings")
        if self.tied is not None or told is None or told == self.config.tie_word_embeddings:
            return self.tied
        return bool(self.config.tie_word_embeddings)

    def override(self, config: Any) -> None:
        """Set the options in a configuration."""
        for name, value in self.options.items():
            setattr(config, name, value)

    def _check_memory(self, complaints: Complaints, model: CausalLM) -> None:
        from accelerate.utils.modeling import convert_file_size_to_int

        device = model.like().device
        limit = (self.max_memory or {}).get(device.type if device.index is None else device.index)
        used = sum(x.nbytes for x in model.state_dict().values() if not x.is_meta)
        if limit is None:
            complaints.add(RangeError, "max_memory", f"given for {device}, where the model is", described(self.max_memory))
        elif (most := convert_file_size_to_int(limit)) < used:
            complaints.add(RangeError, "max_memory", f"at least {used} bytes on {device}", most, "A model is on one device.")


def arguments_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> Arguments:
    """The arguments of ``from_pretrained`` after the first. Raises RangeError or DtypeError with all that are wrong."""
    given, complaints = dict(options), Complaints(FUNCTION)
    hub = {name: given.pop(name) for name in HUB if name in given}
    dtype = dtype_of(complaints, given.pop("dtype", given.pop("torch_dtype", None)))
    device = device_of(complaints, given.pop("device_map", None))
    config, info, subfolder = given.pop("config", None), bool(given.pop("output_loading_info", False)), given.pop("subfolder", None) or ""
    found = Arguments(hub, dtype, device, config, subfolder, given.pop("max_memory", None), info)
    found.options = {name: given.pop(name) for name in OPTIONS if name in given}
    found.tied = given.pop("tie_word_embeddings", None)
    found.adapter_name, found.adapter_options = given.pop("adapter_name", "default"), dict(given.pop("adapter_kwargs", None) or {})
    if given.pop("ignore_mismatched_sizes", None):
        complaints.add(RangeError, "ignore_mismatched_sizes", "False", True, "Every tensor must fit.")
    unknown = sorted(name for name, value in given.items() if name not in MEANINGLESS and not name.startswith("_") and value is not None)
    for name in (*unknown, *("more than a path" for _ in arguments)):
        complaints.add(RangeError, "arguments", "of this model", name, "See PenstockForCausalLM.from_pretrained.")
    complaints.raise_any()
    return found


def dtype_of(complaints: Complaints, value: Any) -> torch.dtype | None:
    """``dtype``; None: as stored."""
    if value is None or value == "auto":
        return None
    found = getattr(torch, value, value) if isinstance(value, str) else value
    if isinstance(found, torch.dtype):
        return found
    complaints.add(DtypeError, "dtype", "a torch.dtype, its name or 'auto'", described(value))
    return None


def device_of(complaints: Complaints, value: Any) -> torch.device | None:
    """``device_map``."""
    if value == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(value, dict) and list(value) == [""]:
        value = value[""]
    if value is None:
        return None
    try:
        if isinstance(value, str | int | torch.device):
            return torch.device(value)
    except RuntimeError:
        pass  # not the name of a device
    complaints.add(RangeError, "device_map", "one device, 'auto' or None", described(value), "A model is on one device.")
    return None


def downloaded(name: str, hub: dict[str, Any], subfolder: str = "") -> Path:
    """The folder of a repository of the hub, downloaded if needed."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.bin", "*.pth", "*.txt", "*.model"]
    within = [f"{subfolder}/{one}" for one in patterns] if subfolder else patterns
    return Path(snapshot_download(name, allow_patterns=within, **hub))
