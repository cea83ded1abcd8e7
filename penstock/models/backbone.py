"""The backbone of models: embeddings, layers and the last norm. ``CausalLM`` and the Hugging Face classes add a head.

Hooks, wrappers and replaced ``forward``s act on every module in every pass. A module that has any is not fused with others.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..call.private import in_transform, is_fake
from ..call.recompute import recomputing
from ..errors import Complaints, DeviceError, RangeError
from ..layers import Mixer, Sequences, Stateless
from ..layers.as_written import altered, gathers, hooked, remembered, unwrapped
from ..layers.chains import Chain, plain
from ..layers.examples import Draw, examples
from ..layers.fused import add_norm
from ..layers.norms import RMSNorm
from ..layers.sequences import adopt, drawn
from ..layers.sizes import check_whole
from ..layers.sliced import sequences_of
from ..layers.token_cache import check_rooms
from ..layers.values import EMBEDDED, IDS, RESIDUAL, Values, check_layers, joined, of_model, own, passed
from ..tokens.context import ContextParallel
from .arguments import check_embeddings, check_state, check_tokens, marks
from .config import Config, rwkv6
from .updates import UPDATE_MIXER, MixerUpdate, drawn_state, updated


class LayerState(NamedTuple):
    """The state of one layer: the states of its two mixers."""

    mixer: Any
    channel: Any


State = list[LayerState]
"""The state of a model: one ``LayerState`` per layer; None for a module of another class in place of a layer."""


@remembered
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
        takes, self.yields = joined(self.mixer, self.channel)
        self.takes = {name: size for name, size in takes.items() if name != RESIDUAL}

    def forward(
        self, x: Tensor, state: LayerState | None, sequences: Sequences, values: Values | None = None
    ) -> tuple[Any, ...]:  # fmt: skip
        """Map x [B,T,C] to y of the same shape and the new state; then the values, if it ``yields`` any.

        ``state`` None: the state before the first token. In place, it is a pool, which is updated and returned. ``values``: those that its
        mixers take of earlier layers (``layers.values``).
        """
        values = {} if values is None else dict(values)
        state = LayerState(None, Stateless() if self.channel is None else None) if state is None else state
        x, _ = self._entered(x, None, sequences)
        halvings = sequences.halvings
        x, normed = add_norm(x, None, self.mixer_norm, in_float32=self.residual_in_float32, halvings=halvings)
        values[RESIDUAL] = x
        y, mixer = passed(self.mixer, Mixer, values, normed, state.mixer, sequences)
        if self.channel is None:
            return x + y, LayerState(mixer, state.channel), *own(values, self.yields)
        assert self.channel_norm is not None
        x, normed = add_norm(x, y, self.channel_norm, in_float32=self.residual_in_float32, halvings=halvings)
        values[RESIDUAL] = x
        y, channel = passed(self.channel, Mixer, values, normed, state.channel, sequences)
        return x + y, LayerState(mixer, channel), *own(values, self.yields)

    def advance(
        self, x: Tensor, y: Tensor | None, state: LayerState, sequences: Sequences, values: Values
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Map x + y, the residual stream and the output of the previous mixer, to such a pair; ``state`` is updated in place.

        Computes ``forward`` with kernels that are fused across modules. ``values``: those of earlier layers; those that this one yields
        are added.
        """
        x, y = self._entered(x, y, sequences)
        in_float32 = self.residual_in_float32
        x, y = UPDATE_MIXER(MixerUpdate(self.mixer, self.mixer_norm, x, y, state.mixer, sequences, in_float32, values))
        if self.channel is None:
            return x, y
        return UPDATE_MIXER(MixerUpdate(self.channel, self.channel_norm, x, y, state.channel, sequences, in_float32, values))

    def _entered(self, x: Tensor, y: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor | None]:
        """X and y at the begin of this layer; in float16 models, divided according to ``rescale_every`` (``layers.halving``)."""
        halvings = self.halvings if sequences.halves else 0
        if halvings != sequences.halvings:
            sequences.halvings = halvings
        if not (halvings and self.halves):
            return x, y
        return x * 0.5, None if y is None else y * 0.5

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> LayerState:
        """The state of ``count`` sequences before their first token."""
        mixers = (unwrapped(one, Mixer) for one in (self.mixer, self.channel))  # type: ignore[type-abstract]
        return LayerState(*(Stateless() if one is None else one.initial_state(count, like, max_length) for one in mixers))


Pair = tuple[Tensor, Tensor | None]
"""The residual stream, and the output of the previous mixer, which is not added yet."""


class LayerUpdate(NamedTuple):
    """The arguments of an update of a layer."""

    module: Any
    x: Tensor
    y: Tensor | None
    state: Any
    sequences: Sequences
    values: Values
    """Of earlier layers; those that this one yields are added."""


def _refuses_layer(c: LayerUpdate) -> str | None:
    why = None if gathers(c.module, Layer, "advance") else altered(c.module, Layer)
    return None if why is None else f"the layer {why}"


def _layer(c: LayerUpdate) -> Pair:
    found: Pair = c.module.advance(c.x, c.y, c.state, c.sequences, c.values)
    return found


def _layer_as_module(c: LayerUpdate) -> Pair:
    x, after = passed(c.module, Layer, c.values, c.x if c.y is None else c.x + c.y, c.state, c.sequences)
    adopt(c.state, after)
    return x, None


def _draw_layer(draw: Draw) -> LayerUpdate:
    config = rwkv6(vocab_size=8, hidden_size=48, num_layers=1, intermediate_size=72, head_size=16, mix_rank=4, decay_rank=4)
    layer, x, y = draw.module("layer", Layer(config, 0), 0.2), draw("x", 3, 1, 48), draw("y", 3, 1, 48)
    state = LayerState(*(drawn_state(draw, part) for part in layer.initial_state(5, x)))
    return LayerUpdate(layer, x, y, state, drawn(draw, x, slots=[4, 0, 2], in_place=True), {})


UPDATE_LAYER: Chain[LayerUpdate, Pair] = Chain(
    "update_layer",
    plain("parts", _layer, _refuses_layer, examples(_draw_layer, torch.float32, gradients=False)),
    plain("module", _layer_as_module),
    results=updated,
)
"""``parts``: the chains of its mixers."""


def _with_parameters(layer: nn.Module, parameters: dict[str, Tensor], *given: Any) -> Any:
    """A layer with the parameters of the forward pass. In the backward pass it may have others, after ``torch.func.functional_call``.

    ``fully_shard`` exchanges the parameters of a module by hooks.
    """
    same = hasattr(layer, "unshard") or all(x is parameters[name] for name, x in layer.named_parameters())
    return layer(*given) if same else torch.func.functional_call(layer, parameters, given)


class Backbone(nn.Module):
    """Embeddings, layers and a norm, without a head. A base class.

    ``gradient_checkpointing = True`` saves only the inputs of layers; the backward pass recomputes the rest.
    ``gradient_checkpointing = "selective"`` recomputes only what takes little time: norms, token shifts, log decays, and the states inside
    recurrences.
    """

    gradient_checkpointing: bool | Literal["selective"] = False

    @property
    def sizes(self) -> Config:
        """The sizes of the model."""
        raise NotImplementedError

    def _make(self, config: Config) -> None:
        """Make the modules."""
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = norm(config) if config.embedding_norm else None
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = norm(config)
        self._checked: tuple[object, ...] | None = None  # the marks of the last checked pool
        self._grows = any(one.grows for one in config.mixers)
        """Whether the state of a sequence grows."""
        complaints = Complaints("Config")
        check_layers(complaints, zip(config.mixers, self.layers), config.hidden_size)  # type: ignore[arg-type]
        complaints.raise_any()
        taken = set().union(*(layer.takes for layer in self.layers))  # type: ignore[arg-type]
        self.yields = {name: size for name, size in of_model(config.hidden_size).items() if name in taken}

    def _initialise(self) -> None:
        """Initialise the embeddings; other modules initialise their own weights."""
        if self.sizes.embedding_norm:  # as RWKV's training code
            nn.init.uniform_(self.embeddings.weight, -1e-4, 1e-4)
        else:
            nn.init.normal_(self.embeddings.weight, std=0.02)

    def initial_state(self, count: int, *, max_length: int | None = None) -> State:
        """The state of ``count`` sequences before their first token; also a pool of ``count`` rows for ``advance``.

        ``max_length`` matters only to models with softmax attention: the number of tokens that a row can hold.
        """
        complaints = Complaints("initial_state")
        check_whole(complaints, "count", count, 0)
        if max_length is not None:
            check_whole(complaints, "max_length", max_length, 0)
        complaints.raise_any()
        return self._initial_state(count, self.like(), max_length)

    def _initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> State:
        layers = (unwrapped(one, Layer) for one in self.layers)
        return [None if one is None else one.initial_state(count, like, max_length) for one in layers]  # type: ignore[misc]

    def hidden(
        self, ids: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, *, context: ContextParallel | None = None
    ) -> tuple[Tensor, State]:  # fmt: skip
        """The input of a head [B,T,C], and the state. Arguments and errors as for ``CausalLM.forward``."""
        return self._hidden("hidden", ids, None, state, cu_seqlens, context=context)

    def _hidden(
        self, function: str, ids: Tensor | None, embedded: Tensor | None, state: State | None, cu_seqlens: Tensor | None,
        every: list[Tensor] | None = None, *, context: ContextParallel | None = None, final_states: bool = True,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """``hidden``, of tokens or of their embeddings [B,T,C]. The embeddings and the output of each layer are appended to ``every``.

        Without ``final_states``, those of a context are undefined: they are not exchanged.
        """
        sequences = self._check(function, ids, embedded, state, cu_seqlens, context=context, final_states=final_states)
        checkpointing = self._checkpointing(function)
        with recomputing() if checkpointing == "selective" else nullcontext():
            x, after = self._embedded(ids, embedded), []
            values = self._values(ids, x)
            for n, layer in enumerate(self.layers):
                if every is not None:
                    every.append(x * 2.0**sequences.halvings if sequences.halvings else x)
                before = None if state is None else state[n]
                call = None
                if checkpointing is True:
                    call = partial(checkpoint, _with_parameters, layer, dict(layer.named_parameters()), use_reentrant=False)
                x, new = passed(layer, Layer, values, x, before, sequences, call=call)
                after.append(new)
            return self._normed(x, None, sequences), after

    def _checkpointing(self, function: str) -> bool | Literal["selective"]:
        """What the backward pass recomputes: ``gradient_checkpointing``, False without gradients."""
        given, complaints = self.gradient_checkpointing, Complaints(function)
        if not (isinstance(given, bool) or given == "selective"):
            complaints.add(RangeError, "gradient_checkpointing", "True, False or 'selective'", repr(given))
        elif given and not torch.compiler.is_compiling() and in_transform():
            remedy = "Set model.gradient_checkpointing = False."
            complaints.add(RangeError, "gradient_checkpointing", "False inside torch.func transforms", repr(given), remedy)
        complaints.raise_any()
        return given if torch.is_grad_enabled() else False

    @torch.no_grad()
    def _advance(
        self, ids: Tensor | None, embedded: Tensor | None, state: State, cu_seqlens: Tensor | None, slots: Tensor | None = None, *,
        last_only: bool = False, every: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """The input of a head [B,T,C], with ``last_only`` [N,C]; rows of the pool ``state`` are updated in place."""
        sequences = self._check("advance", ids, embedded, state, cu_seqlens, slots, in_place=True)
        x, y = self._embedded(ids, embedded), None
        values = self._values(ids, x)
        for layer, one in zip(self.layers, state):
            if every is not None:
                x, y = x if y is None else x + y, None
                every.append(x * 2.0**sequences.halvings if sequences.halvings else x)
            x, y = UPDATE_LAYER(LayerUpdate(layer, x, y, one, sequences, values))
        if last_only:
            x, y = sequences.last(x), None if y is None else sequences.last(y)
        return self._normed(x, y, sequences)

    def like(self, device: torch.device | None = None) -> Tensor:
        """An empty tensor with the dtype of the embeddings, on their device or another one.

        Modules in place of the embeddings may have quantised weights, or none of their own.
        """
        tensors = chain(self.embeddings.parameters(), self.embeddings.buffers(), self.parameters())
        weight = next(one for one in tensors if one.is_floating_point())
        return torch.empty(0, dtype=weight.dtype, device=weight.device if device is None else device)

    def _embedded(self, ids: Tensor | None, embedded: Tensor | None = None) -> Tensor:
        x: Tensor = self.embeddings(ids) if embedded is None else embedded
        if self.embedding_norm is not None:
            x = add_norm(x, None, self.embedding_norm, rounded=False)[1]
        return x.float() if self.sizes.residual_in_float32 and x.dtype != torch.float64 else x

    def _values(self, ids: Tensor | None, embedded: Tensor) -> Values:
        """The values that the model ``yields``: those that some layer takes. Layers add theirs."""
        given = {EMBEDDED: embedded} if ids is None else {IDS: ids[..., None], EMBEDDED: embedded}
        return {name: given[name] for name in self.yields}

    def _normed(self, x: Tensor, y: Tensor | None, sequences: Sequences) -> Tensor:
        return add_norm(x, y, self.norm, in_float32=self.sizes.residual_in_float32, halvings=sequences.halvings)[1]

    def _check(
        self, function: str, ids: Tensor | None, embedded: Tensor | None = None, state: State | None = None,
        cu_seqlens: Tensor | None = None, slots: Tensor | None = None, *, in_place: bool = False, context: ContextParallel | None = None,
        final_states: bool = True,
    ) -> Sequences:  # fmt: skip
        """Raise for wrong arguments; states in place must be writable."""
        complaints, like = Complaints(function), self.like()
        if type(getattr(self.embeddings, "weight", None)) is not nn.Parameter:
            self._refuse_sharded(complaints)
        given, name = (ids, "ids") if embedded is None else (embedded, "inputs_embeds")
        if like.is_meta and isinstance(given, Tensor):
            like = self.like(given.device)  # hooks move weights to the device
        if embedded is None:
            check_tokens(complaints, given, self.sizes.vocab_size, like.device)
        else:
            check_embeddings(complaints, embedded, self.sizes.hidden_size, like.device)
            self._refuse_embeddings(complaints)
        complaints.raise_any()
        assert given is not None
        options: Any = {"in_place": in_place, "context": context, "final_states": final_states}
        sequences = sequences_of(complaints, given, name, cu_seqlens, slots, state, **options)
        sequences.halves = like.dtype == torch.float16
        if in_place or state is not None:
            count = None if slots is not None else sequences.count
            found = marks(state, count, like.dtype, like.device) if in_place and not is_fake(like) else None
            if found is None or found != self._checked:  # decode steps use one pool many times
                check_state(complaints, state, self._initial_state(0, like, 0), count, written=in_place)
                complaints.raise_any()
                if found is not None:
                    self._checked = found
            if in_place and self._grows:
                check_rooms(state, sequences)
        return sequences

    def _refuse_embeddings(self, complaints: Complaints) -> None:
        """Add the reason why a call needs tokens, not their embeddings, if there is one."""
        if IDS in self.yields:
            rule = "None for a model whose layers read tokens, such as DeepEmbed"
            complaints.add(RangeError, "inputs_embeds", rule, "a tensor", "Pass the tokens themselves as input_ids.")

    def _refuse_sharded(self, complaints: Complaints) -> None:
        """Raise for parameters that ``fully_shard`` gathers only in calls of methods that it knows."""
        if hasattr(getattr(self.embeddings, "weight", None), "device_mesh") and hooked(self.embeddings) is None:
            remedy = f"Call penstock.distributed.shard, or register_fsdp_forward_method(model, {complaints.function!r}) of torch."
            complaints.add(DeviceError, "model", "one whose parameters are gathered for this call", "sharded embeddings", remedy)
            complaints.raise_any()


def norm(config: Config) -> nn.Module:
    """A norm of hidden_size elements."""
    if config.norm == "layer_norm":
        return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)
    return RMSNorm(config.hidden_size, config.norm_eps)
