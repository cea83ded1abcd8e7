"""The time mix and the channel mix of an RWKV-7 ("Goose", x070) block, with the parameter names of its published checkpoints.

>>> first, second = (RWKV7Config(head_size=8).build(hidden_size=16, layer=n, num_layers=2) for n in range(2))
>>> x = torch.randn(1, 6, 16)
>>> y, state, values = first(x)
>>> values["value"].shape
torch.Size([1, 6, 16])
>>> y, state = second(x, values=values)

Source: Peng et al. 2025, arXiv 2503.14456, section 4 and appendix (initialisation); the constants are from the authors' training code,
github.com/BlinkDL/RWKV-LM, ``RWKV-v7/train_temp/src/model.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import Complaints, RangeError
from ..tokens.dtypes import state_dtype
from .decode import shifted_norm
from .deep_embed import deep_embed
from .fused import activated
from .halving import halved, last_map
from .linear import linear, linears, plain_weights
from .mixer import Mixer, MixerConfig
from .modes import PLAIN, mode
from .norm_gate import Added, norm_gate
from .rwkv import ShiftState, TunedMixer, check_head_size, head_count, matrix, orthogonal, ramp
from .rwkv7_chains import Learned, Mixed, recurrence_inputs
from .rwkv7_decode import LowRankMap, low_rank_map, low_rank_maps, rwkv7_step
from .sequences import Sequences
from .shared_input import linears_of
from .token_shift import token_shift
from .values import EMBEDDED, IDS, Values, of_model

VALUE = "value"
"""The name of the values of layer 0."""


@dataclass(frozen=True)
class RWKV7Config(MixerConfig):
    """The sizes of an RWKV-7 time mix. In a model, layer 0 has one, whose values the others take."""

    kind = "rwkv7"
    head_size: int = 64
    """K = V, channels of a head."""
    num_heads: int | None = None
    """H. Default: hidden_size / head_size."""
    decay_rank: int = 64
    """The rank of the decay."""
    rate_rank: int = 64
    """The rank of the in-context learning rate."""
    value_rank: int = 32
    """The rank of the weight of layer 0's values."""
    gate_rank: int = 128
    """The rank of the output gate."""
    norm_eps: float = 64e-5
    """The epsilon of ``ln_x``, for every head size."""
    tuned_state: bool = False
    """Whether sequences begin with a trained state, ``time_state`` [H,K,V], in place of zeros."""

    def check_hidden_size(self, complaints: Complaints, hidden_size: int) -> None:
        """Check that it is a multiple of the size of heads, unless their number is given."""
        check_head_size(complaints, self, hidden_size)

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> RWKV7TimeMix:
        """A new time mix."""
        return RWKV7TimeMix(self, hidden_size, layer, num_layers)


@dataclass(frozen=True)
class RWKV7ChannelConfig(MixerConfig):
    """The sizes of an RWKV-7 channel mix."""

    kind = "rwkv7_channel"
    intermediate_size: int
    """F. In published models 4 * hidden_size."""
    embedding_rank: int | None = None
    """E of DeepEmbed: each token has a matrix [E,E] of its own, 32 in published models. None: no DeepEmbed."""
    vocab_size: int | None = None
    """V, the number of these matrices: that of the model's embeddings. Only with ``embedding_rank``."""

    def check(self, complaints: Complaints) -> None:
        """Check that the number of matrices is given with their size."""
        if (self.embedding_rank is None) != (self.vocab_size is None):
            rule = "a number with embedding_rank, and None without"
            complaints.add(RangeError, "vocab_size", rule, self.vocab_size, "Pass that of the model.")

    def check_vocab_size(self, complaints: Complaints, vocab_size: int) -> None:
        """Check that each token of the model has a matrix."""
        if self.vocab_size not in (None, vocab_size):
            remedy = "Each has a matrix of DeepEmbed in each channel mix."
            complaints.add(RangeError, "vocab_size", f"{self.vocab_size}, the tokens of the channel mixes", vocab_size, remedy)

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> RWKV7ChannelMix:
        """A new channel mix."""
        return RWKV7ChannelMix(self, hidden_size, layer, num_layers)


class RWKV7State(NamedTuple):
    """The state of a time mix."""

    shift: Tensor
    """[N,C], the last input."""
    wkv: Tensor
    """[N,H,K,V], the state of the recurrence, float32 (float64 for float64 models)."""


class Projected(NamedTuple):
    """The linear maps of the token shifts of an input, [B,T,H*N]."""

    r: Tensor
    w: Tensor
    """The raw decay without its bias."""
    k: Tensor
    v: Tensor
    rate: Tensor
    """The logit of the in-context learning rate without its bias."""
    gate: Tensor
    mix: Tensor | None = None
    """The logit of the weight of layer 0's values without its bias."""


class RWKV7TimeMix(TunedMixer):
    r"""Time mixing by the RWKV-7 recurrence.

    p is the input of the previous token, :math:`x_i = x + (p - x) \cdot x\_i` for i in r, w, k, v, a, g, and all products of vectors are
    element-wise:

    .. math::
        r, k, v = W_r x_r, W_k x_k, W_v x_v, \qquad w = w_0 + \tanh(x_w w_1) w_2, \qquad l = \sigma(a_0 + x_a a_1 a_2)

        g = \sigma(x_g g_1) g_2, \qquad \kappa = normalised_H(k \cdot k\_k), \qquad \tilde{k} = k (1 + (l - 1) k\_a)

        \tilde{v} = v + (v_{layer\,0} - v) \cdot \sigma(v_0 + x_v v_1 v_2)

        o = GroupNorm_H(rwkv7(r, w, \tilde{k}, \tilde{v}, -\kappa, \kappa l))

        y = W_o ((o + \langle r, \tilde{k} r\_k \rangle_H \tilde{v}) g)

    w is the raw decay: the log decay is :math:`-e^{-1/2} \sigma(w)`. Layer 0 has no :math:`v_0, v_1, v_2`, and yields its v. Sums, gates
    and norms are computed in float32 for float16 and bfloat16 models, and rounded once.
    """

    halves_output = True

    def __init__(self, config: RWKV7Config, hidden_size: int, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(hidden_size)
        config.require_hidden_size(hidden_size)
        self.config = config
        C, H, n = hidden_size, head_count(config, hidden_size), config.head_size
        A = H * n
        self.takes, self.yields = ({VALUE: A}, {}) if layer else ({}, {VALUE: A})
        deep = layer / max(num_layers - 1, 1)  # 0 in the first block, 1 in the last
        shallow = 1 - layer / num_layers  # 1 in the first block, nearly 0 in the last
        self.x_r = nn.Parameter(1 - ramp(C, 0.2 * shallow))
        self.x_w = nn.Parameter(1 - ramp(C, 0.9 * shallow))
        self.x_k = nn.Parameter(1 - ramp(C, 0.7 * shallow))
        self.x_v = nn.Parameter(1 - ramp(C, 0.7 * shallow))
        self.x_a = nn.Parameter(1 - ramp(C, 0.9 * shallow))
        self.x_g = nn.Parameter(1 - ramp(C, 0.2 * shallow))

        line = ramp(A, 1, last=1) - 0.5
        zigzag = 2 * (torch.arange(A) % n).view(1, 1, A) / max(n - 1, 1) - 1
        zigzag = zigzag * zigzag.abs()
        self.w0 = nn.Parameter(-5.5 + 6 * ramp(A, 1 + deep**0.3, last=1) + 2.5 * zigzag)
        self.w1, self.w2 = low_rank(C, config.decay_rank, A)
        self.a0 = nn.Parameter(-0.19 + 0.3 * zigzag + 0.4 * line)
        self.a1, self.a2 = low_rank(C, config.rate_rank, A)
        if layer:
            self.v0 = nn.Parameter(0.73 - 0.4 * line)
            self.v1, self.v2 = low_rank(C, config.value_rank, A)
        self.g1, self.g2 = low_rank(C, config.gate_rank, A)
        self.k_k = nn.Parameter(0.71 - 0.1 * line)
        self.k_a = nn.Parameter(torch.full((1, 1, A), 1.02))
        self.r_k = nn.Parameter(torch.full((H, n), -0.04))

        self.receptance = matrix(C, A, gain=1)
        self.key = matrix(C, A, gain=0.1)
        self.value = matrix(C, A, gain=1)
        self.output = matrix(A, C, gain=0)
        self.ln_x = nn.GroupNorm(H, A, eps=config.norm_eps)
        nn.init.constant_(self.ln_x.weight, ((1 + layer) / num_layers) ** 0.7)
        if config.tuned_state:
            self.time_state = nn.Parameter(torch.zeros(H, n, n))

    def _blank_state(self, count: int, like: Tensor) -> RWKV7State:
        H, n = self.r_k.shape
        return RWKV7State(like.new_zeros(count, self.x_r.shape[-1]), like.new_zeros(count, H, n, n, dtype=state_dtype(like.dtype)))

    def mix(self, x: Tensor, state: RWKV7State, sequences: Sequences, values: Values | None = None) -> tuple[Any, ...]:
        """Y, the new state and, of layer 0, v."""
        last, shift = sequences.shifted(x, state.shift)
        y, wkv, *yielded = self._mixed(token_shift(x, last, sequences, *self._factors()), state.wkv, sequences, values)
        return y, RWKV7State(shift, wkv), *yielded

    def step(
        self, x: Tensor, y: Tensor | None, norm: nn.Module, state: RWKV7State, sequences: Sequences, values: Values | None = None
    ) -> tuple[Any, ...] | None:  # fmt: skip
        """See ``Mixer.step``."""
        found = shifted_norm(x, y, norm, state.shift, sequences, *self._factors())
        if found is None:
            return None
        mixed, _, *yielded = self._mixed(found.mixed, state.wkv, sequences, values)
        return found.total, mixed, *yielded

    def _factors(self) -> Sequence[Tensor]:
        """The factors of the token shifts of r, w, k, v, a and g."""
        return self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g

    def _mixed(self, mixed: Sequence[Tensor], wkv: Tensor, sequences: Sequences, values: Values | None) -> tuple[Any, ...]:
        """Y, the new state of the recurrence and, of layer 0, v as values, from the results of the token shifts."""
        r, w, k, own, rate, gate, mix = self._project(*mixed)
        yielded = ({VALUE: own},) if self.yields else ()
        learned, output_map = Learned(self.k_k, self.k_a, self.r_k, self.w0, self.a0), last_map(self.output, sequences)
        v = own if values is None or mix is None else Mixed(own, mix, values[VALUE], self.v0)
        stepped = rwkv7_step(r, k, w, rate, learned, v, gate, self.ln_x, wkv, sequences)
        if stepped is not None:
            return output_map(stepped), wkv, *yielded
        c = recurrence_inputs(r, k, w, rate, learned, v)
        output, wkv = sequences.delta_rule("rwkv7", c.r, c.k, c.v, c.raw, a=c.a, b=c.b, raw_decay=True, state=wkv)
        added = Added(c.share, c.values)
        y = norm_gate(output, gate, self.ln_x, output_map, grouped=True, activation="identity", added=added)
        return y, wkv, *yielded

    def _project(self, x_r: Tensor, x_w: Tensor, x_k: Tensor, x_v: Tensor, x_a: Tensor, x_g: Tensor) -> Projected:
        """The linear maps and low-rank maps of the token shifts."""
        maps, mixes = (self.receptance, self.key, self.value), VALUE in self.takes
        low = [
            LowRankMap(x_w, self.w1, self.w2, "tanh"),
            LowRankMap(x_a, self.a1, self.a2),
            LowRankMap(x_g, self.g1, self.g2, "sigmoid"),
            *([LowRankMap(x_v, self.v1, self.v2)] if mixes else []),
        ]
        if (x_r.is_cpu or mode() != PLAIN) and plain_weights(maps) is not None:  # all maps of x in one launch or call
            weights: list[Tensor | nn.Module] = [*maps, *(one.down.T for one in low)]
            if (found := linears([x_r, x_k, x_v, *(one.x for one in low)], weights)) and (parts := low_rank_maps(*low, hidden=found[3:])):
                return Projected(found[0], parts[0], *found[1:3], *parts[1:])
        few, parts = linears((x_r, x_k, x_v), maps), low_rank_maps(*low)
        shares = mixes and parts is None
        r, k = few[:2] if few else (self.receptance(x_r), self.key(x_k))
        v, *hidden = few[2:] if few else linears_of(x_v, (self.value, *([self.v1.T] if shares else [])))
        w, rate, gate, *mix = parts or [*map(low_rank_map, low[:3]), *(low_rank_map(one, *hidden) for one in low[3:])]
        return Projected(r, w, k, v, rate, gate, *mix)


class RWKV7ChannelMix(Mixer):
    r"""Channel mixing of RWKV-7; its only state is the previous input p.

    .. math:: y = W_v \, relu(W_k (x + (p - x) \cdot x\_k))^2

    With DeepEmbed (``embedding_rank``), each channel of the square has a factor that the token t decides. z is the embedding of t after
    its norm, of the whole model:

    .. math::
        D_t = reshape_{E,E}(s\_emb_t + W_{s\_emb\_x} z), \qquad
        y = W_v \, (relu(W_k (x + (p - x) \cdot x\_k))^2 \cdot (x s_1 D_t s_2 + s_0))

    Then it takes the tokens and their embeddings of the model. Source: ``RWKV-v7/rwkv_v7a_demo.py`` of its authors, which is inference
    with the sum of both parts of D stored for each token. Initially the factor is 1.
    """

    halves_output = True

    def __init__(self, config: RWKV7ChannelConfig, hidden_size: int, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(hidden_size)
        self.config = config
        C, F, E = hidden_size, config.intermediate_size, config.embedding_rank
        self.x_k = nn.Parameter(1 - ramp(C, (1 - layer / num_layers) ** 4))
        self.key = matrix(C, F, gain=1)
        self.value = matrix(F, C, gain=0)
        if E is not None and config.vocab_size is not None:
            self.takes, self.vocab_size = of_model(C), config.vocab_size
            self.s_emb = nn.Embedding(config.vocab_size, E * E)
            nn.init.zeros_(self.s_emb.weight)
            self.s_emb_x = matrix(C, E * E, gain=math.sqrt(max(E * E / C, 1) / E))  # elements of D are about E^-1/2
            self.s1, self.s2 = low_rank(C, E, F)
            self.s0 = nn.Parameter(torch.ones(1, 1, F))

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> ShiftState:
        """Zeros."""
        return ShiftState(like.new_zeros(count, self.hidden_size))

    def mix(self, x: Tensor, state: ShiftState, sequences: Sequences, values: Values | None = None) -> tuple[Tensor, ShiftState]:
        """Y and the new state."""
        last, shift = sequences.shifted(x, state.shift)
        (mixed,) = token_shift(x, last, sequences, self.x_k)
        return self._mixed(mixed, x, sequences, values), ShiftState(shift)

    def step(
        self, x: Tensor, y: Tensor | None, norm: nn.Module, state: ShiftState, sequences: Sequences, values: Values | None = None
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """See ``Mixer.step``."""
        found = shifted_norm(x, y, norm, state.shift, sequences, self.x_k, kept=values is not None)
        return None if found is None else (found.total, self._mixed(found.mixed[0], found.normed, sequences, values))

    def _mixed(self, mixed: Tensor, x: Tensor, sequences: Sequences, values: Values | None) -> Tensor:
        """Y from the result of the token shift and, for DeepEmbed, the input."""
        if values is not None:
            k = self._squared(mixed, x, values)
        elif few := linears([mixed], [self.key], relu_squared=True):
            k = few[0]
        else:
            return activated(self.key(mixed), None, "relu_squared", last_map(self.value, sequences))
        found = linears([halved(k, sequences)], [self.value])
        return found[0] if found else last_map(self.value, sequences)(k)

    def _squared(self, mixed: Tensor, x: Tensor, values: Values) -> Tensor:
        """The squares times the factors of DeepEmbed [B,T,F]."""
        embedded, maps = values[EMBEDDED].to(x.dtype), (self.key, self.s1.T, self.s_emb_x)
        k, hidden, part = linears([mixed, x, embedded], maps, relu_squared=True) or (
            activated(self.key(mixed), None, "relu_squared"), linear(x, self.s1.T), self.s_emb_x(embedded),
        )  # fmt: skip
        return deep_embed(k, hidden, values[IDS].squeeze(-1), self.s_emb, part, self.s2, self.s0)


def low_rank(inputs: int, rank: int, outputs: int) -> tuple[nn.Parameter, nn.Parameter]:
    """New weights [inputs,rank] and [rank,outputs] of a low-rank map, which is 0: zeros, and a tenth of orthogonal rows or columns."""
    up = nn.Parameter(torch.empty(rank, outputs))
    orthogonal(up, 0.1 * math.sqrt(max(rank / outputs, 1)))
    return nn.Parameter(torch.zeros(inputs, rank)), up
