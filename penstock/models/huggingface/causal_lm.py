"""A causal language model, as transformers expects one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, LogitsProcessorList
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...errors import Complaints, RangeError, ShapeError
from ...tokens import borders
from ...tokens.context import ContextParallel
from ..causal_lm import CausalLM
from ..config import Config
from ..loss import head_cross_entropy
from ..sampling import check_logits
from .cache import CACHE, StateCache, cache_of
from .configuration import PenstockConfig
from .logits_to_keep import check_columns, chosen
from .model import PenstockModel
from .packing import check_alone, kept, offsets
from .pretrained import PenstockPreTrainedModel, check, option

IGNORED = -100
"""Labels that do not count."""


class PenstockForCausalLM(PenstockPreTrainedModel, GenerationMixin):
    """A causal language model as transformers expects one: ``model``, a ``PenstockModel``, and ``head``.

    Padding, where ``attention_mask`` is 0, is left out of the computation. So batches may be padded on either side, and every sequence
    has the results that it has alone. The logits at padding are those of the last token before it. Beam search works; assisted
    generation, which would remove tokens again, is refused. ``causal_lm()`` has the same modules as a ``CausalLM``.
    """

    accepts_loss_kwargs = True
    _tied_weights_keys = {"head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: PenstockConfig) -> None:
        super().__init__(config)
        made = CausalLM(Config.from_dict(config.model))
        with torch.device("meta"):
            self.model = PenstockModel(config)
        self._take(made)
        self.post_init()  # type: ignore[no-untyped-call]

    def _take(self, model: CausalLM) -> None:
        self.model._take(model)
        self.head = model.head

    def causal_lm(self) -> CausalLM:
        """The same modules as a ``CausalLM``, for ``penstock.models.save``, ``penstock.engine`` and ``generate`` without transformers."""
        with torch.device("meta"):
            found = CausalLM(self.model.sizes)
        for name, module in (*self.model.named_children(), ("head", self.head)):
            setattr(found, name, module)
        return found.train(self.training)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cache: StateCache | None = None,
        cache_position: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_loss: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        context: ContextParallel | None = None,
        **others: Any,
    ) -> Any:
        """Logits, the loss if there are labels, and the state.

        input_ids : int64 or int32 Tensor [B,T]
        inputs_embeds : Tensor [B,T,C]
            Embeddings as from ``get_input_embeddings()``, in place of ``input_ids``.
        attention_mask : Tensor [B,at least T], optional
            0 for padding, which is left out, and 1 for tokens. With a cache, it may begin with the columns of its tokens.
        past_key_values, cache : StateCache, optional
            The state that an earlier call returned; two names of one argument. It is updated: a call without gradients writes to its
            tensors.
        labels : int64 Tensor [B,T], optional
            Usually ``input_ids``: the label of a token is its own index. -100 does not count. They are shifted here.
        shift_labels : int64 Tensor [B,T], optional
            In place of ``labels``: the label of a token is the one after it.
        use_cache : bool, optional
            Whether to return a state. Default: as configured in evaluation mode without labels, not in training.
        logits_to_keep : int or Tensor
            The number of tokens at the end that get logits; 0: all. Or, as in transformers, a selection: columns [n] or [B,n], or a bool
            mask [T] or [B,T]. With a mask [B,T] the logits are [number of True, vocab_size].
        cu_seqlens, cu_seq_lens_q : int32 or int64 Tensor [N+1], optional
            Packed sequences: offsets over the tokens of all rows, row after row. The first token of a sequence is not predicted.
            ``cu_seq_lens_k`` must be equal.
        seq_idx : int32 or int64 Tensor [B,T], optional
            The number of the sequence of each token: packed sequences begin where it changes.
        position_ids : int64 or int32 Tensor [B,T], optional
            Packed sequences begin where positions restart. Otherwise positions must increase by 1; their values are not used.
        num_items_in_batch : int or Tensor, optional
            Divides the sum of losses in place of the number of labels, as the Trainer does with accumulated gradients.
        output_hidden_states : bool, optional
            Whether to return the embeddings, the output of each layer but the last, and the last hidden states after the norm. Default: as
            configured.
        context : ContextParallel, optional
            The tokens and labels are those of one rank (docs/scaling.md). There is no padding, and packed sequences are those of the
            context. The loss is this rank's part: parts are summed.

        ``max_length_q``, ``max_length_k``, ``cache_position``, ``token_type_ids`` and ``return_loss`` change nothing. Raises ShapeError,
        DtypeError, RangeError or DeviceError.
        """
        name, shift_labels = type(self).__name__, others.pop("shift_labels", None)  # the Trainer takes named arguments for columns of data
        for other in others:
            raise TypeError(f"{name}: {other} is no argument of this model. See PenstockForCausalLM.forward.")
        B, T = check(name, input_ids, inputs_embeds, output_attentions, labels, shift_labels)
        check_columns(name, logits_to_keep, B, T)
        past = cache_of(name, past_key_values, cache)
        keep = kept(name, attention_mask, B, T, past.columns if past is not None else 0)
        packing = {"cu_seqlens": cu_seqlens, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k, "seq_idx": seq_idx}
        starts = offsets(name, B, T, keep, **packing, position_ids=position_ids)
        if context is not None:
            check_alone(name, keep, starts)
        labelled = labels is not None or shift_labels is not None
        output = self.model(
            input_ids=input_ids, attention_mask=None if keep is None else attention_mask, cu_seqlens=starts, inputs_embeds=inputs_embeds,
            past_key_values=past, use_cache=False if labelled and use_cache is None else use_cache,
            output_hidden_states=option(output_hidden_states, self.config.output_hidden_states), return_dict=True, context=context,
        )  # fmt: skip
        x, loss, logits = output.last_hidden_state, None, None
        if labelled:
            loss = self._loss(x, labels, shift_labels, keep, starts, num_items_in_batch, context)
        if loss is None or not (self.config.fuse_loss and self.training):
            logits = self.head(chosen(x, logits_to_keep))
        found = CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=output.hidden_states, **{CACHE: output.get(CACHE)})
        return found if option(return_dict, self.config.return_dict) else found.to_tuple()

    def generate(self, inputs: Any = None, generation_config: Any = None, logits_processor: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. Raises ShapeError, DtypeError or RangeError for wrong prompts, and for logits that are NaN."""
        name, ids = "generate", kwargs.get("input_ids") if inputs is None else inputs
        embeds, positions = kwargs.get("inputs_embeds"), kwargs.pop("position_ids", None)
        if ids is not None or embeds is not None:
            B, T = check(name, None if embeds is not None else ids, embeds)
            if embeds is not None:
                complaints = Complaints(name)
                self.model._refuse_embeddings(complaints)
                complaints.raise_any()
            keep = kept(name, kwargs.get("attention_mask"), B, T)
            if B * T == 0:
                rule = "of shape [B,T] with B and T at least 1"
                raise ShapeError(f"{name}: input_ids must be {rule}, got {[B, T]}. Start with at least one token.")
            if offsets(name, B, T, keep, position_ids=positions) is not None:
                raise RangeError(f"{name}: position_ids must be one sequence a row, got packed ones. Pass a row for each, with padding.")
        processors = LogitsProcessorList([*(logits_processor or ()), _checked])
        base: Any = super()
        return base.generate(inputs, generation_config, processors, *args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: Any, *args: Any, inputs_embeds: Tensor | None = None, is_first_iteration: bool | None = False, **kwargs: Any
    ) -> Any:
        """As in transformers; only prompts have padding. Raises RangeError if no token follows those of the cache."""
        new, tokens = kwargs.get("next_sequence_length"), input_ids.shape[1]
        positions = kwargs.get("cache_position")  # transformers 5.0 passes it instead of the length
        if new is None and positions is not None and not len(positions):
            new = tokens - kwargs[CACHE].get_seq_length()
        if new is not None and new < 1:
            rule = f"of fewer tokens than input_ids, which are {tokens}"
            raise RangeError(f"generate: {CACHE} must be {rule}, got {tokens - new}. Pass all tokens, a new one at least.")
        base: Any = super()
        options = {"inputs_embeds": inputs_embeds, "is_first_iteration": is_first_iteration}
        found = base.prepare_inputs_for_generation(input_ids, *args, **options, **kwargs)
        for name in ("tokenizer", "assistant_tokenizer"):  # generate passes its own arguments on
            found.pop(name, None)
        found.pop("position_ids", None)  # counted by generate, wrongly after padding on the right
        if CACHE in found and not is_first_iteration:
            found.pop("attention_mask", None)
        return found

    def get_input_embeddings(self) -> nn.Module:
        """The embeddings of tokens."""
        embeddings: nn.Module = self.model.embeddings
        return embeddings

    def set_input_embeddings(self, value: Any) -> None:
        """Replace them; their number is the new vocab_size."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        head: nn.Module = self.head
        return head

    def set_output_embeddings(self, value: Any) -> None:
        """Replace it."""
        self.head = value

    def _loss(
        self, x: Tensor, labels: Tensor | None, shifted: Tensor | None, keep: Tensor | None, starts: Tensor | None,
        count: Tensor | int | None, context: ContextParallel | None,
    ) -> Tensor:  # fmt: skip
        """The loss of hidden states [B,T,C] of tokens that are not padding."""
        if shifted is None:
            assert labels is not None
            if context is None:
                targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
            else:
                starts = None if context.cu_seqlens is None else context.cu_seqlens.to(x.device)
                targets = torch.cat([labels, borders.following(context, labels, IGNORED)], 1)[:, 1:]
            if keep is not None:
                targets = targets.masked_fill(~F.pad(keep[:, 1:], (0, 1)), IGNORED)
            if starts is not None:
                begins = torch.zeros(targets.numel() + 1, dtype=torch.bool, device=x.device).index_fill(0, starts.long(), True)
                begins[-1:] = False  # the last target is known
                targets = targets.masked_fill(begins[1:].view(targets.shape), IGNORED)
        else:
            targets = shifted
        if keep is not None:
            x, targets = x[keep], targets[keep]
        options: Any = {"reduction": "mean" if count is None else "sum", "context": context}
        loss = head_cross_entropy(x, self.head, targets, ignore_index=IGNORED, **options)
        if count is None:
            return loss
        count = count + (count == 0)  # without labels the loss is 0
        return loss / (count.to(loss.device) if isinstance(count, Tensor) else count)


def _checked(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor that changes nothing."""
    check_logits("generate", scores)
    return scores
