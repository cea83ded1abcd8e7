"""The time mix of RWKV-7 with attention beside its recurrence (rwkv7b): keys and values have factors by token, as in DeepEmbed.

>>> config = RWKV7AttentionConfig(head_size=8, vocab_size=20, attention_size=12, attention_rank=4)
>>> mixer, x, ids = config.build(hidden_size=16), torch.randn(1, 6, 16), torch.arange(6).view(1, 6, 1)
>>> y, state, values = mixer(x, values={"ids": ids, "embedded": torch.randn(1, 6, 16), "residual": torch.randn(1, 6, 16)})
>>> state.cache.keys.shape, state.cache.values.shape, state.cache.length
(torch.Size([1, 6, 1, 12]), torch.Size([1, 6, 1, 16]), tensor([6]))

Source: the authors' inference code, github.com/BlinkDL/RWKV-LM, ``RWKV-v7/rwkv_v7b_demo.py``. Their training code is not published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..call.validation import reads_values
from ..errors import Complaints, RangeError
from ..tokens import borders
from ..tokens.dtypes import state_dtype
from .activations import tanh
from .attention_pages import PagedAttentionState, attend_pages
from .halving import halved
from .linear import linear
from .mixer import Mixer
from .rwkv import matrix, orthogonal, ramp
from .rwkv7 import RWKV7Config, RWKV7State, RWKV7TimeMix
from .sequences import Sequences
from .shared_input import linears_of
from .sliced import SlicedSequences
from .token_cache import SoftmaxAttentionState, room_for, stored
from .token_shift import token_shift
from .values import EMBEDDED, IDS, RESIDUAL, Values, of_model

CAP = 64.0
"""The largest score."""
ROWS = 512
"""Queries of a sequence whose scores are in memory together."""


@dataclass(frozen=True)
class RWKV7AttentionConfig(RWKV7Config):
    """The sizes of an RWKV-7 time mix with attention."""

    kind = "rwkv7_attention"
    grows = paged = True
    vocab_size: int = 65536
    """V, the number of rows of both tables: that of the model's embeddings."""
    attention_size: int = 256
    """A, the elements of a query and a key. Values have hidden_size elements: there is one head."""
    attention_rank: int = 32
    """The rank of the maps of keys and values."""
    attention_norm_eps: float = 1e-5
    """The epsilon of the norms of queries, keys and values."""
    max_length: int = 4096
    """The number of tokens that a row of ``initial_state`` can hold."""
    window_size = None
    """Tokens attend to all earlier ones."""

    def check_vocab_size(self, complaints: Complaints, vocab_size: int) -> None:
        """Check that each token of the model has its rows."""
        if self.vocab_size != vocab_size:
            remedy = "Each token has a row in the tables of keys and values."
            complaints.add(RangeError, "vocab_size", f"{self.vocab_size}, the tokens of the time mixes", vocab_size, remedy)

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> RWKV7AttentionTimeMix:
        """A new time mix."""
        return RWKV7AttentionTimeMix(self, hidden_size, layer, num_layers)


class RWKV7AttentionState(NamedTuple):
    """The state of a time mix with attention: that of the recurrence, and a cache of up to S tokens per sequence."""

    shift: Tensor
    """[N,C], the last input."""
    wkv: Tensor
    """[N,H,K,V], the state of the recurrence, float32 (float64 for float64 models)."""
    query: Tensor
    """[N,A], the last query before its token shift."""
    key: Tensor
    """[N,A], the last key, likewise."""
    value: Tensor
    """[N,C], the last value, likewise."""
    cache: SoftmaxAttentionState
    """Keys [N,S,1,A] and values [N,S,1,C] after their norms, of all tokens."""


class DeepEmbedAttention(nn.Module):
    r"""Causal attention with one head, whose keys and values come from maps of a low rank times factors of the token.

    x is the residual stream, z the embedding of the token t after its norm, p(u) the u of the previous token:

    .. math::
        q' = W_{qq} x, \qquad k' = x k_1 k_2 \cdot (k\_emb_t + W_{k\_emb\_x} z), \qquad
        v' = \tanh(x v_1 v_2) \cdot (v\_emb_t + W_{v\_emb\_x} z)

        u = LayerNorm_u(u' + (p(u') - u') \cdot x\_u) \quad (u = q, k, v), \qquad s_{ij} = 64 \tanh(q_i \cdot k_j / (64 \sqrt{A}))

        y_i = \sum_{j \le i} softmax_j(s_{ij}) v_j

    Initially the factors are 1 and y is 0. Scores take memory T * S.
    """

    def __init__(self, config: RWKV7AttentionConfig, hidden_size: int, shallow: float) -> None:
        super().__init__()
        C, A, R, V, eps = hidden_size, config.attention_size, config.attention_rank, config.vocab_size, config.attention_norm_eps
        self.qq = matrix(C, A, gain=1)
        self.x_q = nn.Parameter(1 - ramp(A, 0.2 * shallow))
        self.x_k, self.x_v = (nn.Parameter(1 - ramp(size, 0.7 * shallow)) for size in (A, C))
        self.k1, self.k2, self.v1, self.v2 = (nn.Parameter(torch.empty(*sizes)) for sizes in ((C, R), (R, A), (C, R), (R, C)))
        for one in (self.k1, self.k2, self.v1, self.v2):
            orthogonal(one, 1)
        self.k_emb, self.v_emb = nn.Embedding(V, A), nn.Embedding(V, C)
        for table in (self.k_emb, self.v_emb):
            nn.init.ones_(table.weight)
        self.k_emb_x, self.v_emb_x = matrix(C, A, gain=0), matrix(C, C, gain=0)
        self.lnq, self.lnk, self.lnv = nn.LayerNorm(A, eps), nn.LayerNorm(A, eps), nn.LayerNorm(C, eps)
        nn.init.zeros_(self.lnv.weight)

    def forward(self, ids: Tensor, embedded: Tensor, x: Tensor, state: RWKV7AttentionState, sequences: Sequences) -> tuple[Any, ...]:
        """Map x [B,T,C], ids [B,T] and embeddings [B,T,C] to y [B,T,C] and the new ``query``, ``key``, ``value`` and ``cache``."""
        q, k, v = linears_of(x, (self.qq, self.k1.T, self.v1.T))
        if sequences.halvings:
            q, k, v = (one * 2.0**sequences.halvings for one in (q, k, v))
        k = linear(k, self.k2.T) * (self.k_emb(ids) + self.k_emb_x(embedded)).to(k.dtype)
        v = tanh(linear(v, self.v2.T)) * (self.v_emb(ids) + self.v_emb_x(embedded)).to(v.dtype)
        q, query = _shifted(q, state.query, self.x_q, self.lnq, sequences)
        k, key = _shifted(k, state.key, self.x_k, self.lnk, sequences)
        v, value = _shifted(v, state.value, self.x_v, self.lnv, sequences)
        y, cache = _attended(q, k, v, state.cache, sequences)
        return y, query, key, value, cache


def _shifted(x: Tensor, last: Tensor, factor: Tensor, norm: nn.Module, sequences: Sequences) -> tuple[Tensor, Any]:
    """The norm of the token shift of x [B,T,...], and the new ``last``."""
    before, after = sequences.shifted(x, last)
    y: Tensor = norm(*token_shift(x, before, sequences, factor))
    return y, after


def _attended(q: Tensor, k: Tensor, v: Tensor, cache: Any, sequences: Sequences) -> tuple[Tensor, Any]:
    """Y [B,T,C] and the new cache."""
    length, here = sequences.read(cache.length), sequences.here
    after, every = length + sequences.lengths, sequences
    if isinstance(cache, PagedAttentionState):
        y = attend_pages(q[:, :, None], k[:, :, None], v[:, :, None], cache, sequences, cap=CAP)
        return y.squeeze(2), cache._replace(length=after)
    if isinstance(sequences, SlicedSequences):
        context = sequences.context
        k, v = borders.whole(context, torch.cat([k, v], -1)).split([k.shape[-1], v.shape[-1]], -1)
        every = Sequences(k, None if context.offsets is None else sequences.all_offsets)
    k, v, room = k[:, :, None], v[:, :, None], cache.keys.shape[1]
    if room or sequences.in_place or every.cu_seqlens is not None:
        room = room_for(room, after, every)
        k, v = (stored(sequences.read(rows), x, length, room, every) for rows, x in ((cache.keys, k), (cache.values, v)))
    own, so_far = sequences.rows_here(length) if isinstance(sequences, SlicedSequences) else (slice(None), after)
    return attention(q, k[own].squeeze(2), v[own].squeeze(2), so_far, here), SoftmaxAttentionState(k, v, after)


def attention(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, sequences: Sequences) -> Tensor:
    """The output [B,T,C] of queries [B,T,A], the last ones of the first ``lengths`` [N] tokens of rows [N,S,A] and [N,S,C]."""
    if not q.numel():
        # with edges to all arguments: every rank takes part in the exchanges of their gradients
        return q.new_zeros(*q.shape[:2], values.shape[-1]) + 0 * (q.sum() + keys[:0].sum() + values[:0].sum())
    rows, here = q, sequences.lengths
    if sequences.cu_seqlens is not None:  # a row for each sequence
        rows = stored(q.new_zeros(sequences.count, 0, q.shape[-1]), q, torch.zeros_like(here), int(here.max()), sequences)
    compiling = torch.compiler.is_compiling()
    if reads_values(lengths) and not compiling:
        longest = int(lengths.max())
        keys, values = keys[:, :longest], values[:, :longest]
    wide, place = state_dtype(q.dtype), torch.arange(keys.shape[1], device=q.device)
    unused = (place >= lengths[:, None])[..., None]  # a pool has old tokens there
    keys, values = (one.to(wide).masked_fill(unused, 0) for one in (keys, values))
    positions = (lengths - here)[:, None] + torch.arange(rows.shape[1], device=q.device)
    # compiled graphs are for any number of tokens
    blocks = [slice(None)] if compiling else [slice(n, n + ROWS) for n in range(0, rows.shape[1], ROWS)]
    found = [_attention(rows[:, one].to(wide), keys, values, place <= positions[:, one, None]) for one in blocks]
    y = torch.cat(found, 1).to(q.dtype)
    if sequences.cu_seqlens is None:
        return y
    places = sequences.owner * y.shape[1] + sequences.positions(torch.zeros_like(here))[0]
    return y.flatten(0, 1).index_select(0, places)[None]


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The output [N,T,C] of queries [N,T,A] to the keys [N,S,A] that they see [N,T,S]."""
    scores = CAP * tanh(q @ k.mT * (q.shape[-1] ** -0.5 / CAP))
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


class RWKV7AttentionTimeMix(RWKV7TimeMix):
    r"""Time mixing of RWKV-7 plus attention to all earlier tokens, which reads the residual stream before the norm of this mixer.

    .. math:: y = RWKV7TimeMix(x) + DeepEmbedAttention(residual)

    It takes the tokens, their embeddings and the residual stream. The cache grows with the sequence: the host waits for the device, as in
    ``SoftmaxAttention``, whose rules for ``advance`` hold here, too.
    """

    config: RWKV7AttentionConfig
    step = Mixer.step  # type: ignore[assignment]

    def __init__(self, config: RWKV7AttentionConfig, hidden_size: int, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(config, hidden_size, layer, num_layers)
        self.takes, self.vocab_size = {**self.takes, **of_model(hidden_size), RESIDUAL: hidden_size}, config.vocab_size
        self.attention = DeepEmbedAttention(config, hidden_size, 1 - layer / num_layers)

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> RWKV7AttentionState:
        """Empty caches for up to ``max_length`` tokens, by default the configuration's, beside the state of the recurrence."""
        return self._with_room(super().initial_state(count, like), like, self.config.max_length if max_length is None else max_length)

    def empty_state(self, count: int, like: Tensor) -> RWKV7AttentionState:
        """The same with room for 0 tokens, and with gradients of ``time_state``."""
        return self._with_room(super().empty_state(count, like), like, 0)

    def unpaged(self, like: Tensor) -> str | None:
        """Why no kernel attends to pages of keys of tensors like this one. Plain PyTorch waits for the device."""
        return f"scores are at most {CAP:.0f}, and heads of values have another size than those of keys"

    def _with_room(self, state: RWKV7State, like: Tensor, room: int) -> RWKV7AttentionState:
        N, A, C = state.shift.shape[0], self.config.attention_size, self.hidden_size
        lasts = (like.new_zeros(N, size) for size in (A, A, C))
        length = torch.zeros(N, dtype=torch.int64, device=like.device)
        cache = SoftmaxAttentionState(like.new_zeros(N, room, 1, A), like.new_zeros(N, room, 1, C), length)
        return RWKV7AttentionState._make((*state, *lasts, cache))

    def mix(self, x: Tensor, state: Any, sequences: Sequences, values: Values | None = None) -> tuple[Any, ...]:
        """Y, the new state and, of layer 0, v."""
        assert values is not None
        y, (shift, wkv), *yielded = super().mix(x, RWKV7State(*state[:2]), sequences, values)
        residual, embedded = values[RESIDUAL].to(x.dtype), values[EMBEDDED].to(x.dtype)
        attended, *after = self.attention(values[IDS].squeeze(-1), embedded, residual, state, sequences)
        new = RWKV7AttentionState._make((shift, wkv, *after))
        return y + halved(attended, sequences), new, *yielded
