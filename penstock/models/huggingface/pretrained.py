"""The base of the Hugging Face classes: loading, and checks of arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import Complaints, DtypeError, RangeError, ShapeError, described, shortened
from ...layers.sizes import check_whole
from ..causal_lm import CausalLM
from ..config import Config
from .configuration import PenstockConfig, config_of
from .hub import Arguments, arguments_of

if TYPE_CHECKING:
    from typing_extensions import Self


class PenstockPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """The base of the Hugging Face classes."""

    config_class = PenstockConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ["Layer"]  # noqa: RUF012

    def __init__(self, config: PenstockConfig, *arguments: Any, **options: Any) -> None:
        if not isinstance(config, PenstockConfig):
            complaints = Complaints(type(self).__name__)
            remedy = "Sizes of public models are read from their weights: use from_pretrained. For a new one, PenstockConfig.of(gla(...))."
            complaints.add(DtypeError, "config", "a PenstockConfig", f"one of type {type(config).__name__}", remedy)
            complaints.raise_any()
        super().__init__(config, *arguments, **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *arguments: Any, **options: Any) -> Any:
        """Load a model in evaluation mode, as ``penstock.models.load`` does, from a folder, a file or the hub.

        pretrained_model_name_or_path : str or Path
            A path, or the name of a repository of the Hugging Face hub; also of an adapter of PEFT, which is loaded with its model
            (``adapter_name``, ``adapter_kwargs``).
        config : PretrainedConfig, optional
            Its options, such as ``fuse_loss`` or ``pad_token_id``, are kept; sizes are those of the checkpoint.
        dtype : torch.dtype or str, optional
            Default and "auto": as stored. (``torch_dtype`` is another name.)
        device_map : str, int, torch.device or dict, optional
            One device; "auto" is a GPU if there is one.
        subfolder : str
            The folder of the checkpoint in the folder or repository.
        max_memory : dict, optional
            The most bytes of weights on a device: raises RangeError if the model has more.

        Options of ``PenstockConfig`` and of transformers' configurations (``use_cache``, ``pad_token_id``, ``output_hidden_states``) are
        taken by name, as are the hub's (``revision``, ``cache_dir``, ``token``, ``local_files_only``, ``force_download``) and those of
        transformers that change nothing here. Raises what ``load`` raises.
        """
        given = arguments_of(arguments, options)
        adapter, name = given.adapter(str(pretrained_model_name_or_path))
        place = given.place(name)
        model = given.load(place, head=cls.can_generate())
        config = config_of(model, given, place)
        wrapped = cls._plain()._of(model, config)
        wrapped.config.name_or_path = wrapped.name_or_path = name
        if wrapped.can_generate() and (place / "generation_config.json").is_file():
            from transformers import GenerationConfig

            wrapped.generation_config = GenerationConfig.from_pretrained(place)
        if adapter is not None:
            wrapped._adapt(adapter, given)
        return (wrapped, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}) if given.info else wrapped

    def _adapt(self, place: str, given: Arguments) -> None:
        """Load an adapter of PEFT into this model. Raises RangeError if weights of it are missing or belong to no module."""
        found = self.load_adapter(place, adapter_name=given.adapter_name, adapter_kwargs=given.adapter_options)
        missing, others = (sorted(getattr(found, one, None) or ()) for one in ("missing_keys", "unexpected_keys"))
        complaints, rule = Complaints("from_pretrained"), f"an adapter of this model, with all its weights, in {place!r}"
        for names, value in ((missing, "none for"), (others, "unknown ones:")):
            if names:
                complaints.add(RangeError, "adapter", rule, f"{value} {shortened(', '.join(names))}")
        complaints.raise_any()

    def set_attn_implementation(self, *arguments: Any, **options: Any) -> None:
        """Of transformers; without effect, because layers have their own attention."""

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *arguments: Any, **options: Any
    ) -> nn.Embedding:
        """Of transformers. Raises RangeError if layers have tables of tokens, which would keep their size; then nothing has changed."""
        sizes, complaints = Config.from_dict(self.config.model), Complaints("resize_token_embeddings")
        for name, value in (("new_num_tokens", new_num_tokens), ("pad_to_multiple_of", pad_to_multiple_of)):
            if value is not None:
                check_whole(complaints, name, value, 1)
        complaints.raise_any()
        count, multiple = new_num_tokens or sizes.vocab_size, pad_to_multiple_of or 1
        sizes.check_vocab_size(complaints, -(-count // multiple) * multiple)
        complaints.raise_any()
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, *arguments, **options)

    @classmethod
    def of(cls, model: CausalLM, **others: Any) -> Self:
        """Wrap a model, whose modules are shared; ``PenstockModel`` has no head. ``others`` belong to ``PenstockConfig``.

        Raises DtypeError for anything but a ``CausalLM``.
        """
        model = getattr(model, "_orig_mod", model)  # torch.compile(model)
        if not isinstance(model, CausalLM):
            complaints = Complaints(f"{cls.__name__}.of")
            remedy = "causal_lm() returns that of a wrapped model."
            complaints.add(DtypeError, "model", "a CausalLM", f"one of type {type(model).__name__}", remedy)
            complaints.raise_any()
        return cls._of(model, PenstockConfig.of(model.config, dtype=model.like().dtype, **others))  # type: ignore[no-any-return]

    @classmethod
    def _plain(cls) -> Any:
        """The class without another project's configuration: a loaded model has Penstock's."""
        return next(kind for kind in cls.__mro__ if vars(kind).get("config_class", PenstockConfig) is PenstockConfig)

    @classmethod
    def _of(cls, model: CausalLM, config: PenstockConfig) -> Any:
        """The modules of a model in one of these classes."""
        with torch.device("meta"):
            wrapped = cls(config)
        wrapped._take(model)
        return wrapped.train(model.training)

    def _take(self, model: CausalLM) -> None:
        raise NotImplementedError

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Modules initialise themselves."""


def option(given: bool | None, configured: bool | None) -> bool:
    """An argument or, if it is None, the configured value."""
    return bool(configured if given is None else given)


def check(name: str, ids: object, embeds: object, attentions: bool | None = None, *labels: object) -> tuple[int, int]:
    """Check the shapes of tokens, or of their embeddings, and of labels. Returns B and T."""
    complaints = Complaints(name)
    if (ids is None) == (embeds is None) and embeds is not None:
        complaints.add(RangeError, "inputs_embeds", "None with input_ids", "both", "Pass one of them.")
    x, argument, axes = (ids, "input_ids", "[B,T]") if embeds is None else (embeds, "inputs_embeds", "[B,T,C]")
    if not isinstance(x, Tensor) or x.dim() != axes.count(",") + 1:
        found = list(x.shape) if isinstance(x, Tensor) else described(x)
        remedy = "One sequence is input_ids[None]. What a tokenizer returns is passed as **encoding, with return_tensors='pt'."
        complaints.add(ShapeError, argument, f"a tensor of shape {axes}", found, remedy)
        complaints.raise_any()
    assert isinstance(x, Tensor)
    B, T = x.shape[:2]
    for argument, given in zip(("labels", "shift_labels"), labels):
        if given is not None and (not isinstance(given, Tensor) or given.shape != (B, T)):
            found = list(given.shape) if isinstance(given, Tensor) else described(given)
            complaints.add(ShapeError, argument, f"of shape {[B, T]}, as input_ids", found)
    if labels and all(one is not None for one in labels):
        complaints.add(RangeError, "shift_labels", "None with labels", "both", "Pass one of them.")
    if attentions:
        complaints.add(RangeError, "output_attentions", "False", attentions, "There are no attention weights.")
    complaints.raise_any()
    return B, T
