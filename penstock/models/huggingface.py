"""Hugging Face classes: ``CausalLM`` as a ``PreTrainedModel`` for transformers' ``generate``, ``Trainer`` and Auto classes.

Importing this module registers them. ``AutoModelForCausalLM.from_pretrained`` then loads folders that ``penstock.models.save`` or
``save_pretrained`` wrote and, where transformers has no class of its own, the public layouts of RWKV-5, RWKV-6, GLA and RetNet:

>>> from penstock.models import gla
>>> from penstock.models.huggingface import PenstockForCausalLM
>>> model = PenstockForCausalLM.of(CausalLM(gla(vocab_size=11, hidden_size=16, num_layers=1, num_heads=2)))
>>> model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=5, do_sample=False).shape
torch.Size([1, 8])

Needs ``pip install penstock[transformers]``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Complaints, DtypeError, MissingExtra, RangeError, ShapeError, described
from .causal_lm import CausalLM, LayerState, State
from .checkpoints import load
from .config import Config
from .hub import device_of, downloaded, dtype_of
from .logits_to_keep import check_columns, columns
from .sampling import check_logits

try:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, LogitsProcessorList, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
except ImportError as error:
    raise MissingExtra.of("penstock.models.huggingface", "transformers", "transformers") from error

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of the cache in arguments and outputs of this transformers: ``cache`` since 5.24."""
IGNORED = -100
"""Labels that do not count."""
PUBLIC_TYPES = ("rwkv5", "rwkv6", "gla", "retnet")
"""Model types of public folders that transformers has no class for."""
HUB = ("revision", "cache_dir", "token", "local_files_only", "force_download")
"""Arguments about downloads."""
MEANINGLESS = ("trust_remote_code", "use_safetensors", "low_cpu_mem_usage", "code_revision", "adapter_kwargs", "attn_implementation")
"""Arguments of transformers that change nothing here."""


class PenstockConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """The configuration of ``PenstockForCausalLM``.

    model : dict
        ``Config.to_dict()``.
    fuse_loss : bool
        In training, compute the loss without the logits of all tokens in memory; the output then has no logits.
    use_cache : bool
        Whether calls in evaluation mode return a state.
    """

    model_type = "penstock"
    keys_to_ignore_at_inference = [CACHE]  # noqa: RUF012

    def __init__(self, model: dict[str, Any] | None = None, fuse_loss: bool = False, use_cache: bool = True, **others: Any) -> None:
        self.model = dict(model or {})
        self.fuse_loss = fuse_loss
        self.use_cache = use_cache
        for name, size in (("vocab_size", "vocab_size"), ("hidden_size", "hidden_size"), ("num_hidden_layers", "num_layers")):
            setattr(self, name, self.model.get(size))
            others.pop(name, None)
        others["tie_word_embeddings"] = bool(self.model.get("tie_embeddings", False))
        super().__init__(**others)

    @classmethod
    def of(cls, config: Config, **others: Any) -> PenstockConfig:
        """From the configuration of a ``CausalLM``."""
        return cls(config.to_dict(), architectures=[PenstockForCausalLM.__name__], **others)


class StateCache:
    """The state of B sequences, as ``cache`` or ``past_key_values`` of ``generate``. A call of the model changes it."""

    is_compileable = False
    is_croppable = False
    is_linear = (False,)
    """``generate`` then passes only the tokens behind those of the cache, as for layers of attention."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens so far, with padding."""
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row n what row ``beam_idx[n]`` was."""
        self.state = [LayerState(*(_rows(part, beam_idx) for part in layer)) for layer in self.state]

    def activate_past_recording(self) -> None:
        """Called by ``generate``. States cannot go back, and are not asked to."""


def _rows(part: Any, rows: Tensor) -> Any:
    return type(part)(*(x.index_select(0, rows.to(x.device)) for x in part))


class PenstockForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A ``CausalLM``, which is ``model``, as transformers expects one.

    Padding is left out of the computation wherever ``attention_mask`` is 0, so batches may be padded on either side and every sequence
    has the results that it has alone. The logits at padding are those of the last token before it. Beam search works; assisted
    generation, which would take tokens back, is refused.
    """

    config_class = PenstockConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _is_stateful = True
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _tied_weights_keys = {"model.head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: PenstockConfig) -> None:
        super().__init__(config)
        self.model = CausalLM(Config.from_dict(config.model))
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, model: CausalLM, **others: Any) -> PenstockForCausalLM:
        """Wrap a model, whose weights are shared. ``others`` belong to ``PenstockConfig``."""
        config = PenstockConfig.of(model.config, dtype=model.embeddings.weight.dtype, **others)
        with torch.device("meta"):
            wrapped = PenstockForCausalLM(config)
        wrapped.model = model
        wrapped.train(model.training)
        return wrapped

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *arguments: Any, **options: Any) -> Any:
        """Load a model in evaluation mode, as ``penstock.models.load`` does, from a folder, a file or the hub.

        pretrained_model_name_or_path : str or Path
            A path, or the name of a repository of the Hugging Face hub.
        config : PenstockConfig, optional
            Its options, such as ``fuse_loss``, are kept; sizes are those of the checkpoint.
        dtype : torch.dtype or str, optional
            Default and "auto": as stored. (``torch_dtype`` is another name.)
        device_map : str, int or torch.device, optional
            One device; "auto" is a GPU if there is one.

        Other options of ``PenstockConfig`` and the hub's (``revision``, ``cache_dir``, ``token``, ``local_files_only``,
        ``force_download``) are taken by name. Raises what ``load`` raises.
        """
        config, info = options.pop("config", None), options.pop("output_loading_info", False)
        hub = {name: options.pop(name) for name in HUB if name in options}
        dtype, device = options.pop("dtype", options.pop("torch_dtype", None)), options.pop("device_map", None)
        others = {"fuse_loss": config.fuse_loss} if isinstance(config, PenstockConfig) else {}
        others |= {name: options.pop(name) for name in ("fuse_loss", "use_cache") if name in options}
        unknown = sorted(
            name for name, value in options.items() if name not in MEANINGLESS and not name.startswith("_") and value is not None
        )
        complaints = Complaints("from_pretrained")
        for name in (*unknown, *("more than a path" for _ in arguments)):
            complaints.add(RangeError, "arguments", "of this model", name, "See PenstockForCausalLM.from_pretrained.")
        complaints.raise_any()
        path = str(pretrained_model_name_or_path)
        place = Path(path) if Path(path).exists() else downloaded(path, hub)
        wrapped = PenstockForCausalLM.of(load(place, dtype=dtype_of(complaints, dtype), device=device_of(complaints, device)), **others)
        wrapped.config.name_or_path = path
        if wrapped.can_generate() and (place / "generation_config.json").is_file():
            from transformers import GenerationConfig

            wrapped.generation_config = GenerationConfig.from_pretrained(place)
        return (wrapped, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}) if info else wrapped

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: StateCache | None = None,
    ) -> Any:
        """Logits, the loss if there are labels, and the state.

        input_ids : int64 or int32 Tensor [B,T]
        attention_mask : Tensor [B,at least T], optional
            0 for padding, which is left out. Its last T columns count.
        past_key_values : StateCache, optional
            What an earlier call returned. It is updated: a call without gradients writes to its tensors. ``cache`` is its name in
            transformers 5.24 and later, where the output has that name too.
        labels : int64 Tensor [B,T], optional
            Usually ``input_ids``: the label of a token is its own index. -100 does not count. They are shifted here.
        use_cache : bool, optional
            Whether to return a state. Default: as configured in evaluation mode, not in training.
        logits_to_keep : int or Tensor
            How many tokens at the end get logits; 0: all. Or, as in transformers, which ones: columns [n] or [B,n], or a mask of type bool,
            [T] or [B,T]. With a mask [B,T] the logits are [number of True, vocab_size].
        cu_seqlens : int32 or int64 Tensor [N+1], optional
            Packed sequences, with B = 1. The first token of a sequence is not predicted.
        num_items_in_batch : int or Tensor, optional
            Divides the sum of losses in place of the number of labels, as the Trainer does with accumulated gradients.

        Raises ShapeError, DtypeError, RangeError or DeviceError.
        """
        self._check(
            input_ids, attention_mask, past_key_values, inputs_embeds, labels, cu_seqlens, output_attentions, output_hidden_states, cache
        )
        assert input_ids is not None
        past_key_values = cache if past_key_values is None else past_key_values
        check_columns(type(self).__name__, logits_to_keep, input_ids)
        B, T = input_ids.shape
        ids, starts, keep = input_ids, cu_seqlens, None
        if attention_mask is not None and not bool((attention_mask[:, attention_mask.shape[1] - T :] != 0).all()):
            keep = attention_mask[:, attention_mask.shape[1] - T :] != 0
            ids, starts = input_ids[keep][None], F.pad(keep.sum(1).cumsum(0), (1, 0))
            if ids.numel() == 0:
                raise RangeError("PenstockForCausalLM: attention_mask must be 1 for at least one token, got padding only.")
        cached = past_key_values is not None or (use_cache if use_cache is not None else self.config.use_cache and not self.training)
        loss, logits = None, None
        if labels is None and cached and self._fixed_size and not torch.is_grad_enabled():
            if past_key_values is None:
                past_key_values = StateCache(self.model.initial_state(B if starts is None else starts.numel() - 1))
            last = isinstance(logits_to_keep, int) and logits_to_keep == 1 and cu_seqlens is None and T > 0
            logits = self.model.advance(ids, past_key_values.state, cu_seqlens=starts, last_only=last)
            if not last:
                logits = columns(logits, keep, logits_to_keep)
            else:
                logits = logits[:, None] if keep is None else logits[:, None].where(keep.any(1)[:, None, None], 0.0)
        else:
            x, state = self.model.hidden(ids, None if past_key_values is None else past_key_values.state, starts)
            if labels is not None:
                loss = self._loss(x, labels, keep, cu_seqlens, num_items_in_batch)
            if loss is None or not (self.config.fuse_loss and self.training):
                logits = self.model.head(columns(x, keep, logits_to_keep))
            if past_key_values is not None:
                past_key_values.state = state
            elif cached:
                past_key_values = StateCache(state)
        if past_key_values is not None:
            past_key_values.columns += T
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: past_key_values})  # type: ignore[arg-type]
        return output if return_dict in (None, True) else output.to_tuple()

    def generate(self, inputs: Any = None, generation_config: Any = None, logits_processor: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. Raises ShapeError, DtypeError or RangeError for wrong prompts, and for logits that are NaN."""
        ids = kwargs.get("input_ids") if inputs is None else inputs
        if ids is not None:
            self._check(ids, kwargs.get("attention_mask"))
            if ids.numel() == 0:
                rule = "of shape [B,T] with B and T at least 1"
                raise ShapeError(f"generate: input_ids must be {rule}, got {list(ids.shape)}. Start with at least one token.")
        processors = LogitsProcessorList([*(logits_processor or ()), _checked])
        base: Any = super()
        return base.generate(inputs, generation_config, processors, *args, **kwargs)

    def prepare_inputs_for_generation(self, input_ids: Any, *args: Any, is_first_iteration: bool | None = False, **kwargs: Any) -> Any:
        """As in transformers; only prompts have padding. Raises RangeError if no token follows those of the cache."""
        new = kwargs.get("next_sequence_length")
        if new is not None and new < 1:
            tokens = input_ids.shape[1]
            rule = f"of fewer tokens than input_ids, which are {tokens}"
            raise RangeError(f"generate: {CACHE} must be {rule}, got {tokens - new}. Pass all tokens, a new one at least.")
        base: Any = super()
        found = base.prepare_inputs_for_generation(input_ids, *args, is_first_iteration=is_first_iteration, **kwargs)
        if kwargs.get(CACHE) is not None and not is_first_iteration:
            found.pop("attention_mask", None)
        return found

    def get_input_embeddings(self) -> nn.Module:
        """The embeddings of tokens."""
        embeddings: nn.Module = self.model.embeddings
        return embeddings

    def set_input_embeddings(self, value: Any) -> None:
        """Replace them; their number is the new vocab_size."""
        self.model.embeddings = value
        self.model.config = replace(self.model.config, vocab_size=value.num_embeddings)
        self.config.model["vocab_size"] = value.num_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        head: nn.Module = self.model.head
        return head

    def set_output_embeddings(self, value: Any) -> None:
        """Replace it."""
        self.model.head = value

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Modules initialise themselves."""

    @property
    def _fixed_size(self) -> bool:
        """Whether the state of a sequence does not grow: then calls can write to it."""
        return all(mixer.kind != "softmax_attention" for mixer in self.model.config.mixers)

    def _loss(
        self, x: Tensor, labels: Tensor, keep: Tensor | None, cu_seqlens: Tensor | None, count: Tensor | int | None
    ) -> Tensor:  # fmt: skip
        """The loss of x, what the head gets: of all tokens or (``keep``) of those that are not padding."""
        from .loss import head_cross_entropy

        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if cu_seqlens is not None:
            targets = targets.index_fill(1, (cu_seqlens[1:] - 1).clamp(min=0).long(), IGNORED)
        if keep is not None:
            targets = targets.masked_fill(~F.pad(keep[:, 1:], (0, 1)), IGNORED)[keep][None]
        loss = head_cross_entropy(x, self.model.head, targets, ignore_index=IGNORED, reduction="mean" if count is None else "sum")
        return loss if count is None else loss / (count.to(loss.device) if isinstance(count, Tensor) else count)

    def _check(
        self, ids: object, mask: object, past: object = None, embeds: object = None, labels: object = None, cu_seqlens: object = None,
        attentions: object = None, hidden: object = None, cache: object = None,
    ) -> None:  # fmt: skip
        complaints = Complaints(type(self).__name__)
        if embeds is not None:
            complaints.add(RangeError, "inputs_embeds", "None", described(embeds), "Pass input_ids.")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            found = list(ids.shape) if isinstance(ids, Tensor) else described(ids)
            remedy = "One sequence is input_ids[None]. What a tokenizer returns is passed as **encoding, with return_tensors='pt'."
            complaints.add(ShapeError, "input_ids", "a tensor of shape [B,T]", found, remedy)
            complaints.raise_any()
        assert isinstance(ids, Tensor)
        if mask is not None and (
            not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != ids.shape[0] or mask.shape[1] < ids.shape[1]
        ):
            found = list(mask.shape) if isinstance(mask, Tensor) else described(mask)
            complaints.add(
                ShapeError,
                "attention_mask",
                f"of shape {list(ids.shape)} or wider",
                found,
                "Masks of pairs of tokens have no meaning here.",
            )
        if mask is not None and cu_seqlens is not None:
            complaints.add(RangeError, "attention_mask", "None with cu_seqlens", "both", "Packed batches have no padding.")
        if labels is not None and (not isinstance(labels, Tensor) or labels.shape != ids.shape):
            found = list(labels.shape) if isinstance(labels, Tensor) else described(labels)
            complaints.add(ShapeError, "labels", f"of shape {list(ids.shape)}, as input_ids", found)
        for name, given in (("past_key_values", past), ("cache", cache)):
            if given is not None and not isinstance(given, StateCache):
                complaints.add(DtypeError, name, "a StateCache", type(given).__name__, "Pass what the model returned.")
        if past is not None and cache is not None:
            complaints.add(RangeError, "cache", "None with past_key_values", "both", "They are names of one argument.")
        for name, wanted in (("output_attentions", attentions), ("output_hidden_states", hidden)):
            if wanted:
                complaints.add(RangeError, name, "False", wanted)
        complaints.raise_any()


def _checked(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor that changes nothing."""
    check_logits("generate", scores)
    return scores


def _register() -> None:
    AutoConfig.register(PenstockConfig.model_type, PenstockConfig)
    AutoModelForCausalLM.register(PenstockConfig, PenstockForCausalLM)
    for kind in PUBLIC_TYPES:
        if kind in CONFIG_MAPPING:  # another project's, such as fla's
            continue
        config = type(f"Penstock{kind.capitalize()}Config", (PretrainedConfig,), {"model_type": kind, "__module__": __name__})
        model = type(f"Penstock{kind.capitalize()}ForCausalLM", (PenstockForCausalLM,), {"config_class": config, "__module__": __name__})
        AutoConfig.register(kind, config)
        AutoModelForCausalLM.register(config, model)


_register()
