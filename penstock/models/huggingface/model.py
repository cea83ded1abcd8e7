"""A model without its head, as transformers expects one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...errors import Complaints, DtypeError, ShapeError, described
from ...tokens.context import ContextParallel
from ..backbone import Backbone
from ..config import Config
from .cache import CACHE, StateCache, cache_of
from .configuration import PenstockConfig
from .packing import check_alone, kept, offsets, packed
from .pretrained import PenstockPreTrainedModel, check, option


class PenstockModel(Backbone, PenstockPreTrainedModel):  # type: ignore[misc]
    """Tokens to hidden states: a ``CausalLM`` without its head, for ``AutoModel`` and as ``model`` of ``PenstockForCausalLM``."""

    def __init__(self, config: PenstockConfig) -> None:
        super().__init__(config)
        self._sizes = Config.from_dict(config.model)
        self._make(self._sizes)
        self._initialise()
        self.post_init()  # type: ignore[no-untyped-call]

    @property
    def sizes(self) -> Config:
        """The sizes of the model."""
        return self._sizes

    def _take(self, model: Backbone) -> None:
        for name in dict(self.named_children()):
            setattr(self, name, getattr(model, name))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        cache: StateCache | None = None,
        cache_position: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        context: ContextParallel | None = None,
    ) -> Any:
        """Hidden states after the last norm, ``last_hidden_state`` [B,T,C], and the state. Arguments as for ``PenstockForCausalLM``."""
        name = type(self).__name__
        B, T = check(name, input_ids, inputs_embeds, output_attentions)
        past = cache_of(name, past_key_values, cache)
        keep = kept(name, attention_mask, B, T, past.columns if past is not None else 0)
        packing = {"cu_seqlens": cu_seqlens, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k, "seq_idx": seq_idx}
        starts = offsets(name, B, T, keep, **packing, position_ids=position_ids)
        if context is not None:
            check_alone(name, keep, starts)
        ids, embedded, starts, keep, _ = tokens = packed(input_ids, inputs_embeds, keep, starts)
        cached = past is not None or (use_cache if use_cache is not None else self.config.use_cache and not self.training)
        every: list[Tensor] | None = [] if option(output_hidden_states, self.config.output_hidden_states) else None
        in_place = cached and context is None and not torch.is_grad_enabled() and not self._grows
        if in_place and past is None and not self.like().is_meta:  # offloaded modules create their own states
            given = ids if embedded is None else embedded
            assert given is not None
            past = StateCache(self.initial_state(given.shape[0] if starts is None else starts.numel() - 1))
        if in_place and past is not None:
            x = self._advance(ids, embedded, past.state, starts, every=every)
        else:
            options: Any = {"context": context, "final_states": cached}
            x, state = self._hidden(name, ids, embedded, None if past is None else past.state, starts, every, **options)
            if past is not None:
                past.state = state
            elif cached:
                past = StateCache(state)
        if past is not None:
            past.columns += T if context is None else context.slices[-1].end
        x = tokens.in_rows(x)
        hidden = None if every is None else (*(tokens.in_rows(one) for one in every), x)
        states: Any = {CACHE: past}
        output = BaseModelOutputWithPast(last_hidden_state=x, hidden_states=hidden, **states)
        return output if option(return_dict, self.config.return_dict) else output.to_tuple()

    def get_input_embeddings(self) -> nn.Module:
        """The embeddings of tokens."""
        return self.embeddings

    def set_input_embeddings(self, value: Any) -> None:
        """Replace them; their number is the new vocab_size. Raises DtypeError, ShapeError or, for layers with tables, RangeError."""
        complaints = Complaints("set_input_embeddings")
        if not isinstance(value, nn.Module) or not hasattr(value, "num_embeddings"):
            complaints.add(DtypeError, "value", "an nn.Embedding", described(value))
            complaints.raise_any()
        if (channels := getattr(value, "embedding_dim", self._sizes.hidden_size)) != self._sizes.hidden_size:
            complaints.add(ShapeError, "value", f"of {self._sizes.hidden_size} channels, the hidden_size", channels)
        count: Any = value.num_embeddings
        self._sizes.check_vocab_size(complaints, count)
        complaints.raise_any()
        self._sizes = replace(self._sizes, vocab_size=count)
        self.embeddings = value
        self.config.model["vocab_size"] = count
