"""Softmax attention with a cache of keys and values, for some layers of hybrid models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import Complaints, RangeError
from ..softmax import softmax_attention
from ..tokens import borders
from ..tokens.dtypes import state_dtype
from .attention_pages import PagedAttentionState, attend_pages, unpaged
from .chains import operated
from .halving import last_map
from .heads import projection
from .mixer import Mixer, MixerConfig
from .norms import RMSNorm
from .rotary import check_base, rotary, rotated
from .sequences import Sequences
from .shared_input import linears_of
from .sliced import SlicedSequences
from .token_cache import SoftmaxAttentionState, room_for, stored


@dataclass(frozen=True)
class SoftmaxAttentionConfig(MixerConfig):
    """The sizes of a softmax attention layer."""

    kind = "softmax_attention"
    grows = paged = True
    num_heads: int
    num_kv_heads: int | None = None
    """Heads of k and v. Each is shared by num_heads / num_kv_heads consecutive heads of q. Default: num_heads."""
    head_dim: int | None = None
    """D. Default: hidden_size / num_heads."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether each head of q and k gets an RMS norm."""
    norm_eps: float = 1e-5
    window_size: int | None = None
    """The sliding window: a token attends to this many tokens, itself included. Default: to all earlier ones."""
    rope_theta: float | None = 10000.0
    """The base of the rotary embedding; None: no rotary embedding."""
    max_length: int = 2048
    """The number of tokens that a row of ``initial_state`` can hold."""

    def check(self, complaints: Complaints) -> None:
        """Check that heads of q can share heads of k and v, and the base of the rotary embedding."""
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            complaints.add(RangeError, "num_kv_heads", f"a divisor of num_heads = {self.num_heads}", self.num_kv_heads)
        if self.rope_theta is not None:
            check_base(complaints, self.rope_theta)

    def check_hidden_size(self, complaints: Complaints, hidden_size: int) -> None:
        """Check that heads have whole sizes, and even ones with rotary embedding."""
        if self.head_dim is None and hidden_size % self.num_heads:
            complaints.add(RangeError, "hidden_size", f"a multiple of num_heads = {self.num_heads}", hidden_size, "Or pass head_dim.")
        size = hidden_size // self.num_heads if self.head_dim is None else self.head_dim
        if self.rope_theta is not None and size % 2:
            complaints.add(RangeError, "head_dim", "even with rotary embedding", size)

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> SoftmaxAttention:
        """A new layer."""
        return SoftmaxAttention(self, hidden_size)


class SoftmaxAttention(Mixer):
    r"""Causal softmax attention with grouped heads, rotary embedding and, if wanted, a sliding window.

    .. math:: q, k, v = R_t W_q x, R_t W_k x, W_v x, \qquad y = W_o softmax\_attention(q, k, v)

    The state grows with the sequence. ``forward`` returns a state as long as needed; if sequences are packed or a state is given, the host
    waits for the device. ``advance`` writes to rows of a fixed length: a call that needs more raises RangeError on a CPU and inside
    ``penstock.checks()``; elsewhere tokens beyond the end are not stored. ``advance`` also takes a pool whose rows are in pages
    (``SoftmaxAttentionState.paged``): rows then have different lengths, and may share pages.

    >>> mixer = SoftmaxAttentionConfig(num_heads=4, num_kv_heads=2).build(hidden_size=16)
    >>> y, state = mixer(torch.randn(1, 5, 16))
    >>> state.keys.shape, state.length
    (torch.Size([1, 5, 2, 4]), tensor([5]))
    """

    halves_output = True

    def __init__(self, config: SoftmaxAttentionConfig, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.config = config
        H, G = config.num_heads, config.num_kv_heads or config.num_heads
        config.require_hidden_size(hidden_size)
        D = config.head_dim or hidden_size // H
        self.sizes = H, G, D
        self.q_proj = projection(hidden_size, H * D, config.qkv_bias)
        self.k_proj = projection(hidden_size, G * D, config.qkv_bias)
        self.v_proj = projection(hidden_size, G * D, config.qkv_bias)
        self.o_proj = projection(H * D, hidden_size)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(D, config.norm_eps), RMSNorm(D, config.norm_eps)

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> SoftmaxAttentionState:
        """Empty rows for up to ``max_length`` tokens, by default the configuration's."""
        shape = count, self.config.max_length if max_length is None else max_length, *self.sizes[1:]
        length = torch.zeros(count, dtype=torch.int64, device=like.device)
        return SoftmaxAttentionState(like.new_zeros(shape), like.new_zeros(shape), length)

    def unpaged(self, like: Tensor) -> str | None:
        """See ``attention_pages.unpaged``."""
        return unpaged(like, self.sizes[-1])

    def empty_state(self, count: int, like: Tensor) -> SoftmaxAttentionState:
        """Rows for 0 tokens."""
        return self.initial_state(count, like, 0)

    def mix(self, x: Tensor, state: Any, sequences: Sequences) -> tuple[Tensor, Any]:
        """Y and the new state."""
        length = sequences.read(state.length)
        q, k, v = self._project(x, sequences.positions(length))
        if isinstance(state, PagedAttentionState):
            after = length + sequences.lengths
            output = attend_pages(q, k, v, state, sequences, self.config.window_size)
            return self._project_output(output, sequences), state._replace(length=after)
        if isinstance(sequences, SlicedSequences):
            return self._sliced(q, k, v, state, sequences)
        after = length + sequences.lengths
        if state.keys.shape[1] == 0 and not sequences.in_place:  # no earlier tokens
            output = operated(softmax_attention, q, k, v, cu_seqlens=sequences.cu_seqlens, window=self.config.window_size)
            if sequences.cu_seqlens is None:
                return self._project_output(output, sequences), SoftmaxAttentionState(k, v, after)
            room, keys, values = room_for(0, after, sequences), state.keys, state.values
            keys, values = (stored(cache, one, length, room, sequences) for cache, one in ((keys, k), (values, v)))
            return self._project_output(output, sequences), SoftmaxAttentionState(keys, values, after)
        room = room_for(state.keys.shape[1], after, sequences)
        keys, values = (stored(sequences.read(cache), one, length, room, sequences) for cache, one in ((state.keys, k), (state.values, v)))
        output = self._attend(q, keys, values, after, sequences)
        return self._project_output(output, sequences), SoftmaxAttentionState(keys, values, after)

    def _sliced(
        self, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxAttentionState, sequences: SlicedSequences
    ) -> tuple[Tensor, SoftmaxAttentionState]:
        """Y and the new state of tokens that have earlier ones on other ranks, whose keys and values are gathered."""
        context, here, pairs = sequences.context, sequences.here, torch.stack([k, v], 2)
        if state.keys.shape[1] == 0 and not sequences.final_states:
            reach = None if self.config.window_size is None else self.config.window_size - 1
            rows = borders.earlier(context, pairs, reach)
            keys, values = torch.cat([rows, pairs], 1).unbind(2)
            ends = here.cu_seqlens
            ends = None if ends is None else torch.cat([ends[:1], ends[1:] + rows.shape[1]])
            options: Any = {"cu_seqlens": here.cu_seqlens, "cu_seqlens_k": ends, "window": self.config.window_size}
            return self._project_output(operated(softmax_attention, q, keys, values, **options), sequences), state
        every, length, after = borders.whole(context, pairs), state.length, state.length + sequences.lengths
        all_sequences = Sequences(every, None if context.offsets is None else sequences.all_offsets)
        room = room_for(state.keys.shape[1], after, all_sequences)
        keys, values = (
            stored(cache, one, length, room, all_sequences)
            for cache, one in zip((state.keys, state.values), every.unbind(2))
        )  # fmt: skip
        own, so_far = sequences.rows_here(length)
        output = self._attend(q, keys[own], values[own], so_far, here)
        return self._project_output(output, sequences), SoftmaxAttentionState(keys, values, after)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        H, G, D = self.sizes
        q, k, v = linears_of(x, (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = q.unflatten(-1, (H, D)), k.unflatten(-1, (G, D)), v.unflatten(-1, (G, D))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.config.rope_theta is not None:
            cos, sin = rotary(positions, D, self.config.rope_theta, state_dtype(q.dtype))
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return q, k, v

    def _project_output(self, output: Tensor, sequences: Sequences) -> Tensor:
        y: Tensor = last_map(self.o_proj, sequences)(output.flatten(-2))
        return y

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, sequences: Sequences) -> Tensor:
        """Attention of the tokens to the first ``lengths`` keys of their rows [N,S,G,D].

        The rows are packed sequences, one after another. The unused part of a row is a sequence of its own, without queries.
        """
        N, S = keys.shape[:2]
        if sequences.cu_seqlens is None:
            queries = torch.arange(1, N + 1, device=q.device) * sequences.tokens
        else:
            queries = sequences.ends[1:]
        rows = torch.arange(N, device=q.device) * S
        ends = torch.stack([rows + lengths.clamp(max=S), rows + S], 1).flatten()
        zero = ends.new_zeros(1)
        output = operated(
            softmax_attention, q.flatten(0, 1)[None], keys.flatten(0, 1)[None].to(q.dtype), values.flatten(0, 1)[None].to(q.dtype),
            cu_seqlens=torch.cat([zero, queries.repeat_interleave(2)]), cu_seqlens_k=torch.cat([zero, ends]),
            window=self.config.window_size,
        )  # fmt: skip
        return output.view(q.shape)
