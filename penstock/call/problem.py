"""A validated call: the argument of implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import Self

from .declaration import Option, Result, Signature
from .memory import Seen, rounded


class OfProblem(Protocol):
    """What a problem knows of its operator (``declared.Declared``)."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments."""

    @property
    def options(self) -> tuple[Option, ...]:
        """The options."""

    @property
    def results(self) -> tuple[Result, ...]:
        """The results."""

    @property
    def in_place(self) -> bool:
        """Whether an argument is updated in place."""

    def seen_of(self, problem: Any) -> Seen:
        """The data of calls equal to a valid problem."""


class Problem:
    """The tensors and options of a call by name, and the sizes of its axes. A family adds annotations and properties."""

    operator: OfProblem
    signature: Signature
    sizes: Mapping[str, int]
    """Sizes by axis."""

    @classmethod
    def of(
        cls,
        operator: OfProblem,
        signature: Signature,
        tensors: Sequence[Tensor | None],
        options: Mapping[str, Any],
        sizes: Mapping[str, int],
    ) -> Self:
        """A valid call."""
        problem = object.__new__(cls)
        values = problem.__dict__
        values.update(zip(operator.names, tensors))
        values.update(options, operator=operator, signature=signature, sizes=sizes)
        return problem

    @classmethod
    def known(cls, operator: OfProblem, seen: Seen, tensors: Sequence[Tensor | None]) -> Self:
        """A call that equals a cached call."""
        problem = object.__new__(cls)
        shared = seen.shared
        if shared is None:
            kind = seen.kind
            shared = seen.shared = {**kind.options, "operator": operator, "signature": kind.signature, "sizes": seen.sizes}
        values = problem.__dict__
        values.update(shared)
        values["seen"] = seen
        values.update(zip(operator.names, tensors))
        return problem

    @property
    def whole(self) -> Self:
        """The problem as implementations take it. A family may expand arguments that several heads share."""
        return self

    def shared(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of this problem's arguments, given those that an implementation computed for ``whole``."""
        return gradients

    @property
    def shown(self) -> Mapping[str, int]:
        """The sizes in messages."""
        return self.sizes

    @property
    def function(self) -> str:
        """The name of the public function in messages."""
        return self.signature.function

    @property
    def first(self) -> Tensor:
        """The first argument, which every call has."""
        return self.__dict__[self.operator.names[0]]  # type: ignore[no-any-return]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors in the order of the declaration."""
        return tuple([self.__dict__[name] for name in self.operator.names])

    @cached_property
    def seen(self) -> Seen:
        """The data that equal calls share; launchers cache their plans in it."""
        return self.operator.seen_of(self)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Sizes of the axes that count tokens or sequences, rounded up to powers of two. Calls with equal counts share their plans."""
        return {axis: rounded(self.sizes[axis]) for axis in self.signature.counts.split()}

    def with_tensors(self, tensors: Mapping[str, Tensor | None]) -> Self:
        """The same problem with some tensors replaced by others of the same shapes."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.__dict__.update(tensors)
        other.__dict__.pop("seen", None)
        return other

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.shown.items())
        return f"{self.function}({sizes})"
