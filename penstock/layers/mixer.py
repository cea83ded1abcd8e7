"""The interface of all mixers and the base of their configurations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import Complaints, RangeError
from ..tokens.context import ContextParallel
from .arguments import check_apart, check_input, check_part
from .as_written import overridden, remembered
from .halving import halved
from .sequences import Sequences, adopt
from .sizes import check_fields, check_whole
from .sliced import sequences_of
from .token_cache import check_rooms
from .values import Values, check_values


class Stateless(NamedTuple):
    """The state of a mixer without state."""


@dataclass(frozen=True)
class MixerConfig:
    """Base of the configurations of mixers. A subclass is a frozen dataclass with the sizes of one kind of mixer.

    Its fields are numbers, texts, None, or tuples of these. Raises DtypeError or RangeError for wrong values. Rules beyond types are in
    ``check``. ``register`` makes it known to ``load``.
    """

    kind: ClassVar[str]
    """The name of the kind in files. A subclass needs its own."""
    grows: ClassVar[bool] = False
    """Whether the state of a sequence grows with its tokens, as a cache of keys and values does."""
    paged: ClassVar[bool] = False
    """Whether what grows is a ``SoftmaxAttentionState``, which the mixer also takes in pages. Then its class has ``unpaged``, and the
    configuration ``max_length`` and ``window_size``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if hasattr(cls, "kind") and "kind" not in cls.__dict__:
            complaints = Complaints(cls.__name__)
            complaints.add(RangeError, "kind", "its own", f"{cls.kind!r} of the class that it is made from", f"Set it in {cls.__name__}.")
            complaints.raise_any()
        if "build" in cls.__dict__:
            cls.build = _checked(cls.build)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        complaints = Complaints(type(self).__name__)
        check_fields(complaints, self)
        if not complaints.found:
            self.check(complaints)
        complaints.raise_any()

    def check(self, complaints: Complaints) -> None:
        """Check what a subclass requires beyond the types of its fields, which are right."""

    def check_hidden_size(self, complaints: Complaints, hidden_size: int) -> None:
        """Check what a subclass requires of the hidden size of a model."""

    def check_vocab_size(self, complaints: Complaints, vocab_size: int) -> None:
        """Check what a subclass requires of the number of tokens of a model."""

    def require_hidden_size(self, hidden_size: int) -> None:
        """Raise unless layers of this hidden size can be built."""
        complaints = Complaints(type(self).__name__)
        self.check_hidden_size(complaints, hidden_size)
        complaints.raise_any()

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> Mixer:
        """A new mixer with initial weights. Some initialisations depend on the index of the layer and the number of layers."""
        raise NotImplementedError


def _checked(build: Callable[..., Mixer]) -> Callable[..., Mixer]:
    """``build`` of a configuration, whose arguments are checked before."""

    @wraps(build)
    def checked(self: MixerConfig, hidden_size: int, *more: int, **named: int) -> Mixer:
        complaints = Complaints(f"{type(self).__name__}.build")
        check_whole(complaints, "hidden_size", hidden_size, 1)
        given = dict(zip(("layer", "num_layers"), more)) | named
        for name, least in (("layer", 0), ("num_layers", 1)):
            check_whole(complaints, name, given.get(name, least), least)
        if not complaints.found and "num_layers" in given and given.get("layer", 0) >= given["num_layers"]:
            complaints.add(RangeError, "layer", f"below num_layers = {given['num_layers']}", given["layer"], "The first layer is 0.")
        complaints.raise_any()
        return build(self, hidden_size, *more, **named)

    return checked


@remembered
class Mixer(nn.Module):
    """Base of token mixers and channel mixers: maps x [B,T,C] and a state to y [B,T,C] and the state after the last token.

    A state is a ``NamedTuple`` of tensors whose first axis is the sequence or, for ``advance``, the row of a pool. Subclasses write
    ``initial_state`` and ``mix``. Mixers that pass values of tokens to later layers declare ``yields``, and those that get them ``takes``.
    """

    halves_output: ClassVar[bool] = False
    """Whether ``mix`` and ``step`` divide y by the halvings before it can overflow (see ``halving``). Otherwise y is divided here."""
    takes: Mapping[str, int] = {}
    """Values of earlier layers that ``mix`` gets as its last argument, by name, each with its size of the last axis."""
    yields: Mapping[str, int] = {}
    """Values for later layers that ``mix`` returns as a dict after y and the state, likewise."""
    unquantized: ClassVar[tuple[str, ...]] = ()
    """Names of modules whose weights keep their dtype when a model is quantized, whatever their sizes: low-rank maps, and maps to a number
    for each head. "a.b" is a module of a module. One that a mixer lacks is None."""
    vocab_size: int | None = None
    """The number of tokens that a mixer knows which takes ``ids``. None: any."""
    _stepped: ClassVar[Any] = None
    """The ``mix`` that ``step`` belongs to."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "step" in vars(cls):
            cls._stepped = cls.mix

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    @abstractmethod
    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> Any:
        """The state of ``count`` sequences before their first token, on the device of ``like``; shift states have its dtype.

        ``max_length`` matters to softmax attention only: the number of tokens that a row can hold. Default: as configured.
        """

    @abstractmethod
    def mix(self, x: Tensor, state: Any, sequences: Sequences) -> tuple[Any, ...]:
        """Y and the new state; in place, parts of it may be the pool itself.

        A mixer that takes values gets them as a further argument ``values``; one that yields values returns them, too.
        """

    def empty_state(self, count: int, like: Tensor) -> Any:
        """The state that ``forward`` begins with if it gets none."""
        return self.initial_state(count, like)

    def forward(
        self, x: Tensor, state: Any = None, cu_seqlens: Tensor | Sequences | None = None, values: Values | None = None, *,
        context: ContextParallel | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Map x [B,T,C] to y of the same shape and the state after the last token. Differentiable; ``state`` is not changed.

        A mixer that ``yields`` values returns them after the state, as a dict.

        x : Tensor [B,T,C]
            With ``cu_seqlens``, B is 1. Models on a GPU give it in autocast's dtype under autocast.
        state : NamedTuple, optional
            The state that an earlier call returned for the same N sequences. Default: before the first token.
        cu_seqlens : int32 or int64 Tensor [N+1], optional
            Packed sequences, as for ``penstock.gla``. Models pass the ``Sequences`` that all of their layers share. For an update in place,
            ``state`` is a pool, which is updated and returned.
        values : dict of Tensors [B,T,size], optional
            What the mixer ``takes`` of earlier layers.
        context : ContextParallel, optional
            x are the tokens of one rank (docs/scaling.md). States are those of all sequences, on every rank.
        """
        if isinstance(cu_seqlens, Sequences):
            sequences = cu_seqlens
        else:
            sequences = self._sequences("forward", x, cu_seqlens, state=state, values=values, context=context)
        state = self.empty_state(sequences.count, x) if state is None else state
        y, after, *yielded = self.mix(x, state, sequences, **({} if values is None else {"values": values}))
        y = y if self.halves_output else halved(y, sequences)
        if not sequences.in_place:
            return y, after, *yielded
        sequences.write(state, after)
        return y, state, *yielded

    @torch.no_grad()
    def advance(
        self, x: Tensor, state: Any, *, cu_seqlens: Tensor | None = None, slots: Tensor | None = None, values: Values | None = None
    ) -> Any:  # fmt: skip
        """Map x [B,T,C] to y of the same shape; the rows of the pool ``state`` are updated **in place**. Computes no gradients.

        A mixer that ``yields`` values returns y and these.

        slots : int32 or int64 Tensor [N], optional
            The row of each sequence, all different. A negative slot skips its sequence: no row changes, and its y is undefined.
            Default: sequence n is row n.

        Other arguments as for ``forward``, which runs with its hooks.
        """
        sequences = self._sequences("advance", x, cu_seqlens, slots, state, in_place=True, values=values)
        y, after, *yielded = self(x, state, sequences) if values is None else self(x, state, sequences, values)
        adopt(state, after)
        return (y, *yielded) if yielded else y

    def step(self, x: Tensor, y: Tensor | None, norm: nn.Module, state: Any, sequences: Sequences) -> tuple[Any, ...] | None:
        """An update in place that includes the residual sum and the norm: x + y (x without y), and the results of ``advance`` for its norm.

        A mixer that takes values gets them as a further argument ``values``; one that yields values returns them after y.

        None: the mixer has no kernel for this call and has done nothing. Some mixers compute the sum, the norm and their input in one
        kernel. Not called where ``unstepped`` gives a reason.
        """
        return None

    @property
    def unstepped(self) -> str | None:
        """Why ``step`` does not compute what a call would, or None: hooks, or ``forward`` or ``mix`` replaced, or there is none."""
        kind = type(self)
        if (why := overridden(self, Mixer)) is not None:
            return why
        if kind._stepped is None:
            return "has no step across its norm"
        return None if kind.mix is kind._stepped and "mix" not in vars(self) else "has a mix that its step does not belong to"

    def _sequences(
        self, function: str, x: Tensor, cu_seqlens: Tensor | None, slots: Tensor | None = None, state: Any = None, *,
        in_place: bool = False, values: Values | None = None, context: ContextParallel | None = None,
    ) -> Sequences:  # fmt: skip
        """The sequences of a direct call of a mixer, with checks. A model has checked its own arguments."""
        complaints = Complaints(f"{type(self).__name__}.{function}")
        check_input(complaints, x, self.hidden_size)
        complaints.raise_any()
        check_values(complaints, values, x, self.takes, self.vocab_size)
        complaints.raise_any()
        sequences = sequences_of(complaints, x, "x", cu_seqlens, slots, state, in_place=in_place, context=context)
        if in_place or state is not None:
            sizes = {"N": sequences.count} if slots is None else {}
            check_part(complaints, "state", state, self.empty_state(0, x), sizes, in_place, "x")
            if in_place and not complaints.found and not torch.compiler.is_compiling():
                check_apart(complaints, state)
            complaints.raise_any()
            if in_place:
                check_rooms(state, sequences)
        return sequences
