"""A causal language model from any mixers.

>>> from penstock.models import rwkv6
>>> model = CausalLM(rwkv6(vocab_size=11, num_layers=2, hidden_size=16, head_size=8))
>>> logits, state = model(torch.tensor([[3, 1, 4]]))
>>> logits, state = model(torch.tensor([[1, 5]]), state)  # continues after the first call
>>> logits.shape
torch.Size([1, 2, 11])
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..call.private import in_transform, is_fake
from ..call.recompute import recomputing
from ..errors import Complaints, DtypeError, RangeError, ShapeError, described
from ..layers import Mixer, Sequences, Stateless
from ..layers.fused import add_norm
from ..layers.linear import Linear
from ..layers.norms import RMSNorm
from ..layers.sizes import check_whole
from .arguments import check_sequences, check_state, check_tokens, marks
from .config import Config
from .loss import CHUNK_TOKENS, Reduction, head_cross_entropy
from .sampling import check_logits, check_sampling, sample


class LayerState(NamedTuple):
    """The state of one layer: what its two mixers return."""

    mixer: Any
    channel: Any


State = list[LayerState]
"""The state of a model: one ``LayerState`` for each layer."""


class Output(NamedTuple):
    """What a model returns."""

    logits: Tensor
    """[B,T,vocab_size]"""
    state: State
    """After the last token of each sequence."""


class Layer(nn.Module):
    """``x += mixer(mixer_norm(x)); x += channel(channel_norm(x))``; a layer without channel mixer has the first part only."""

    mixer: Mixer
    channel: Mixer | None

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        C, L, channel = config.hidden_size, config.num_layers, config.channels[layer]
        self.residual_in_float32 = config.residual_in_float32
        self.halvings, rest = divmod(layer, config.rescale_every) if config.rescale_every else (0, 0)
        self.halves = self.halvings > 0 and rest == 0
        self.mixer_norm = norm(config)
        self.mixer = config.mixers[layer].build(C, layer, L)
        self.channel_norm = None if channel is None else norm(config)
        self.channel = None if channel is None else channel.build(C, layer, L)

    def forward(self, x: Tensor, state: LayerState, sequences: Sequences) -> tuple[Tensor, LayerState]:
        """Map x [B,T,C] to y of the same shape and the new state."""
        x, _ = self._entered(x, None, sequences)
        halvings = sequences.halvings
        x, normed = add_norm(x, None, self.mixer_norm, in_float32=self.residual_in_float32, halvings=halvings)
        y, mixer = self.mixer(normed, state.mixer, sequences)
        if self.channel is None:
            return x + y, LayerState(mixer, state.channel)
        assert self.channel_norm is not None
        x, normed = add_norm(x, y, self.channel_norm, in_float32=self.residual_in_float32, halvings=halvings)
        y, channel = self.channel(normed, state.channel, sequences)
        return x + y, LayerState(mixer, channel)

    def advance(self, x: Tensor, y: Tensor | None, state: LayerState, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Map x + y, the residual stream and what the mixer before adds to it, to such a pair; ``state`` is updated in place."""
        x, y = self._entered(x, y, sequences)
        x, y = self._advanced(self.mixer, self.mixer_norm, x, y, state.mixer, sequences)
        if self.channel is None:
            return x, y
        return self._advanced(self.channel, self.channel_norm, x, y, state.channel, sequences)

    def _advanced(
        self, mixer: Mixer, norm: nn.Module | None, x: Tensor, y: Tensor | None, state: Any, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        assert norm is not None
        found = None if self.residual_in_float32 else mixer.step(x, y, norm, state, sequences)
        if found is not None:
            return found
        x, normed = add_norm(x, y, norm, in_float32=self.residual_in_float32, halvings=sequences.halvings)
        return x, mixer.advance(normed, state, cu_seqlens=sequences)

    def _entered(self, x: Tensor, y: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor | None]:
        """X and y at the begin of this layer, in float16 models divided as ``rescale_every`` says (``layers.halving``)."""
        halvings = self.halvings if sequences.halves else 0
        if halvings != sequences.halvings:
            sequences.halvings = halvings
        if not (halvings and self.halves):
            return x, y
        return x * 0.5, None if y is None else y * 0.5

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> LayerState:
        """The state of ``count`` sequences before their first token."""
        channel = Stateless() if self.channel is None else self.channel.initial_state(count, like)
        return LayerState(self.mixer.initial_state(count, like, max_length), channel)

    def empty_state(self, count: int, like: Tensor) -> LayerState:
        """The state that a call without state begins with."""
        channel = Stateless() if self.channel is None else self.channel.empty_state(count, like)
        return LayerState(self.mixer.empty_state(count, like), channel)


def _with_parameters(layer: nn.Module, parameters: dict[str, Tensor], *given: Any) -> Any:
    """A layer with the parameters of the forward pass. In the backward pass it may have others, behind ``torch.func.functional_call``."""
    same = all(x is parameters[name] for name, x in layer.named_parameters())
    return layer(*given) if same else torch.func.functional_call(layer, parameters, given)


class CausalLM(nn.Module):
    """A causal language model: maps tokens to logits of the next token. See the docstring of this module.

    Names of parameters: ``embeddings``, ``embedding_norm`` (if there is one), ``layers.{i}.mixer_norm``, ``layers.{i}.mixer``,
    ``layers.{i}.channel_norm``, ``layers.{i}.channel``, ``norm``, ``head``.

    ``gradient_checkpointing = True`` keeps only the inputs of layers for the backward pass, which computes the rest again.
    ``gradient_checkpointing = "selective"`` computes only what takes little time again: norms, token shifts, log decays, and the states
    inside of recurrences.
    """

    gradient_checkpointing: bool | Literal["selective"] = False

    def __init__(self, config: Config) -> None:
        super().__init__()
        if not isinstance(config, Config):
            complaints = Complaints("CausalLM")
            complaints.add(DtypeError, "config", "a Config", described(config), "See penstock.models.config.")
            complaints.raise_any()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = norm(config) if config.embedding_norm else None
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = norm(config)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.embedding_norm:  # as RWKV's training code
            nn.init.uniform_(self.embeddings.weight, -1e-4, 1e-4)
            nn.init.orthogonal_(self.head.weight, 0.5 * math.sqrt(max(config.vocab_size / config.hidden_size, 1)))
        else:
            nn.init.normal_(self.embeddings.weight, std=0.02)
            nn.init.normal_(self.head.weight, std=0.02)
        self._checked: tuple[object, ...] | None = None  # the marks of the last pool that was checked
        self.tie()

    def tie(self) -> None:
        """Make the head's weight that of the embeddings, if configured so."""
        if self.config.tie_embeddings:
            self.head.weight = self.embeddings.weight

    def initial_state(self, count: int, *, max_length: int | None = None) -> State:
        """The state of ``count`` sequences before their first token; also a pool of ``count`` rows for ``advance``.

        ``max_length`` matters to models with softmax attention only: for how many tokens a row has room.
        """
        complaints = Complaints("initial_state")
        check_whole(complaints, "count", count, 0)
        if max_length is not None:
            check_whole(complaints, "max_length", max_length, 0)
        complaints.raise_any()
        return [layer.initial_state(count, self._like, max_length) for layer in self._layers]

    def forward(self, ids: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> Output:
        """Logits after every token, and the state after the last token of each sequence. Differentiable.

        ids : int64 or int32 Tensor [B,T]
            From 0 to vocab_size - 1. Checked on a CPU, and on other devices inside ``penstock.checks()``.
        state : list of LayerState, optional
            The state that an earlier call returned for the same N sequences. It is not changed. Default: before the first token.
        cu_seqlens : int32 or int64 Tensor [N+1], optional
            Packed sequences: B is 1 and sequence n is tokens ``cu_seqlens[n]`` to ``cu_seqlens[n+1]``. Default: N = B.

        Raises ShapeError, DtypeError, DeviceError or RangeError.
        """
        x, state = self._hidden("forward", ids, state, cu_seqlens)
        return Output(self.head(x), state)

    def hidden(self, ids: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """What ``forward`` gives to the head [B,T,C], and the state. Arguments and errors as for ``forward``."""
        return self._hidden("hidden", ids, state, cu_seqlens)

    def loss(
        self, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None, *, state: State | None = None, ignore_index: int = -100,
        reduction: Reduction = "mean", chunk_tokens: int = CHUNK_TOKENS,
    ) -> Tensor:  # fmt: skip
        """Cross entropy of the next tokens, equal to ``F.cross_entropy(logits.flatten(0, 1), labels.flatten())``, in less memory.

        Only the logits of ``chunk_tokens`` tokens are in memory together, see ``loss.linear_cross_entropy``.

        labels : int64 or int32 Tensor [B,T]
            The token that follows each of ``ids``: for tokens [B,T+1], ``ids = tokens[:, :-1]`` and ``labels = tokens[:, 1:]``. Tokens
            with label ``ignore_index`` do not count.
        reduction : "mean", "sum" or "none"
            Over the tokens that count; "none" returns [B,T].

        Other arguments and errors as for ``forward``.

        >>> from penstock.models import gla
        >>> model = CausalLM(gla(vocab_size=11, num_layers=1, hidden_size=16, num_heads=2))
        >>> tokens = torch.randint(11, (2, 7))
        >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        """
        x, _ = self._hidden("loss", ids, state, cu_seqlens)
        return head_cross_entropy(x, self.head, labels, ignore_index=ignore_index, reduction=reduction, chunk_tokens=chunk_tokens)

    def _hidden(self, function: str, ids: Tensor, state: State | None, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        sequences = self._check(function, ids, state, cu_seqlens)
        checkpointing = self._checkpointing(function)
        with recomputing() if checkpointing == "selective" else nullcontext():
            x = self._embedded(ids)
            after = []
            for n, layer in enumerate(self._layers):
                before = layer.empty_state(sequences.count, self._like) if state is None else state[n]
                if checkpointing is True:
                    x, new = checkpoint(_with_parameters, layer, dict(layer.named_parameters()), x, before, sequences, use_reentrant=False)
                else:
                    x, new = layer(x, before, sequences)
                after.append(new)
            return self._normed(x, None, sequences), after

    def _checkpointing(self, function: str) -> bool | Literal["selective"]:
        """What the backward pass computes again: ``gradient_checkpointing``, False without gradients."""
        given, complaints = self.gradient_checkpointing, Complaints(function)
        if not (isinstance(given, bool) or given == "selective"):
            complaints.add(RangeError, "gradient_checkpointing", "True, False or 'selective'", repr(given))
        elif given and not torch.compiler.is_compiling() and in_transform():
            remedy = "Set model.gradient_checkpointing = False."
            complaints.add(RangeError, "gradient_checkpointing", "False inside torch.func transforms", repr(given), remedy)
        complaints.raise_any()
        return given if torch.is_grad_enabled() else False

    @torch.no_grad()
    def advance(
        self, ids: Tensor, state: State, *, cu_seqlens: Tensor | None = None, slots: Tensor | None = None, last_only: bool = False
    ) -> Tensor:
        """Logits after every token [B,T,vocab_size]; the rows of the pool ``state`` are updated **in place**.

        state : list of LayerState
            A pool of P rows, made by ``initial_state(P)``. Without ``slots``, P = N.
        slots : int32 or int64 Tensor [N], optional
            The row of each sequence, all different. A negative slot skips its sequence: no row changes, its logits have no meaning.
        last_only : bool
            Return the logits after the last token of each sequence only, [N,vocab_size]; those of empty sequences have no meaning.

        Other arguments and errors as for ``forward``. Computes no gradients. A call that raises one of these errors changes nothing.
        """
        sequences = self._check("advance", ids, state, cu_seqlens, slots, in_place=True)
        x, y = self._embedded(ids), None
        for layer, one in zip(self._layers, state):
            x, y = layer.advance(x, y, one, sequences)
        if last_only:
            x, y = sequences.last(x), None if y is None else sequences.last(y)
        logits: Tensor = self.head(self._normed(x, y, sequences))
        return logits

    @torch.no_grad()
    def generate(
        self, ids: Tensor, count: int, *, temperature: float = 1.0, top_p: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Generate ``count`` tokens for each of B sequences: int64 [B,count].

        ids : int64 or int32 Tensor [B,T]
            The prompts, T at least 1.
        count : int
            At least 0.
        temperature : float
            Divides the logits. Finite and at least 0; 0 takes the most likely token.
        top_p : float
            Sample from the smallest set of most likely tokens whose probabilities sum to at least this; above 0 and at most 1.
        generator : torch.Generator, optional
            Source of random numbers. Default: torch's global generator.

        Raises ShapeError, DtypeError, DeviceError or RangeError, also for logits that are NaN.
        """
        complaints = Complaints("generate")
        check_whole(complaints, "count", count, 0)
        check_sampling(complaints, temperature, top_p, generator, self._like.device)
        complaints.raise_any()
        self._check("generate", ids)
        if ids.shape[1] == 0:
            raise ShapeError("generate: ids must be of shape [B,T] with T at least 1, got T = 0. Start with at least one token.")
        B, T = ids.shape
        state = self.initial_state(B, max_length=T + count)
        sampled = ids.new_empty(B, count, dtype=torch.int64)
        given = ids
        for i in range(count):
            logits = self.advance(given, state, last_only=True)
            check_logits("generate", logits, last=i == count - 1)
            sampled[:, i] = sample(logits, temperature, top_p, generator)
            given = sampled[:, i : i + 1]
        return sampled

    @property
    def _layers(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def _like(self) -> Tensor:
        return self.embeddings.weight.detach()

    def _embedded(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embeddings(ids)
        if self.embedding_norm is not None:
            x = add_norm(x, None, self.embedding_norm, rounded=False)[1]
        return x.float() if self.config.residual_in_float32 and x.dtype != torch.float64 else x

    def _normed(self, x: Tensor, y: Tensor | None, sequences: Sequences) -> Tensor:
        return add_norm(x, y, self.norm, in_float32=self.config.residual_in_float32, halvings=sequences.halvings)[1]

    def _check(
        self, function: str, ids: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, slots: Tensor | None = None,
        *, in_place: bool = False,
    ) -> Sequences:  # fmt: skip
        """Raise for wrong arguments; states in place must be writable."""
        complaints = Complaints(function)
        check_tokens(complaints, ids, self.config.vocab_size, self._like.device)
        complaints.raise_any()
        check_sequences(complaints, ids, cu_seqlens, slots, state, "ids")
        complaints.raise_any()
        sequences = Sequences(ids, cu_seqlens, slots, in_place=in_place)
        sequences.halves = self._like.dtype == torch.float16
        if in_place or state is not None:
            count = None if slots is not None else sequences.count
            like = self._like
            found = marks(state, count, like.dtype, like.device) if in_place and not is_fake(like) else None
            if found is None or found != self._checked:  # decode steps use one pool again and again
                wanted = [layer.empty_state(0, self._like) for layer in self._layers]
                check_state(complaints, state, wanted, count, written=in_place)
                complaints.raise_any()
                if found is not None:
                    self._checked = found
        return sequences


def norm(config: Config) -> nn.Module:
    """A norm of hidden_size elements."""
    if config.norm == "layer_norm":
        return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)
    return RMSNorm(config.hidden_size, config.norm_eps)
