"""Fused chains as ordered lists of forms: kernels, and the formula in plain PyTorch as the last form.

A chain is a few operations of a layer between two matrix products, or a matrix product itself. A call of a chain runs the first form that
does not refuse it. The last form takes every call. ``recorded`` collects which forms run, and why not those before them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from ..call.dispatch import Explanation
from ..call.operator import explain

C = TypeVar("C")
R = TypeVar("R")


def never(call: Any) -> str | None:
    """The default of ``refuses``: takes every call."""
    return None


def no_kernels(call: Any) -> tuple[str, ...]:
    """The default of ``kernels``: plain PyTorch, or other chains."""
    return ()


def launches(*forward: str, backward: tuple[str, ...] = ()) -> Callable[[Any], tuple[str, ...]]:
    """``kernels`` of a form that always launches these, the last ones in its backward pass."""
    return lambda call: forward + backward if torch.is_grad_enabled() else forward


@dataclass(frozen=True)
class Form(Generic[C, R]):
    """One way to compute a chain."""

    name: str
    run: Callable[[C], R]
    refuses: Callable[[C], str | None] = never
    """Why it cannot compute a call, or None."""
    kernels: Callable[[C], tuple[str, ...]] = no_kernels
    """The kernels that a call launches, as profiles show them, with those of its backward pass if gradients are enabled."""


class Chain(Generic[C, R]):
    """An ordered list of forms. ``C`` is a ``NamedTuple`` of the arguments of a call."""

    def __init__(self, name: str, *forms: Form[C, R]) -> None:
        self.name, self.forms = name, forms
        self._plain = tuple(form for form in forms if form.kernels is no_kernels)
        CHAINS[name] = self

    def __call__(self, call: C) -> R:
        """The result of the first form that does not refuse a call. Compiled graphs have no kernels of layers."""
        if torch.compiler.is_compiling():
            forms = self._plain
        else:
            forms, recorder = self.forms, _recorder.get()
            if recorder is not None:
                return recorder.run(self, call)
        for form in forms:
            if form.refuses(call) is None:
                return form.run(call)
        raise AssertionError(f"the last form of {self.name} refused a call")


CHAINS: dict[str, Chain[Any, Any]] = {}
"""All chains, by name."""


class Choice(NamedTuple):
    """The form that computed one call of a chain."""

    module: str
    """The name of the module that called the chain, or of the norm that the chain computes. Empty for the model itself."""
    chain: str
    form: str
    kernels: tuple[str, ...]
    """The kernels that it launches, with those of its backward pass if gradients are enabled. Empty for plain PyTorch."""
    reasons: tuple[tuple[str, str], ...]
    """The forms before it, and why they do not run."""


class Operation(NamedTuple):
    """The implementation that computed one call of an operator."""

    module: str
    """The name of the module that called it."""
    function: str
    """The name of the public function."""
    explanation: Explanation


class _Recorder:
    """Collects choices of calls from the modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.found: list[Choice | Operation] = []

    def run(self, chain: Chain[C, R], call: C) -> R:
        """A call of a chain."""
        reasons = []
        for form in chain.forms:
            reason = form.refuses(call)
            if reason is None:
                break
            reasons.append((form.name, reason))
        self.found.append(Choice(self.place(call), chain.name, form.name, form.kernels(call), tuple(reasons)))
        return form.run(call)

    def place(self, call: Any = None) -> str:
        """The name of the norm of a call, else of the innermost module one of whose methods is running.

        Hooks would tell it, too, but a module with hooks runs other forms.
        """
        name = self.names.get(id(getattr(call, "norm", None)))
        frame = sys._getframe()
        while name is None and frame.f_back is not None:
            frame = frame.f_back
            name = self.names.get(id(frame.f_locals.get("self")))
        return name or ""


_recorder: ContextVar[_Recorder | None] = ContextVar("penstock_chains", default=None)


def recording() -> bool:
    """Whether code runs inside ``recorded``."""
    return not torch.compiler.is_compiling() and _recorder.get() is not None


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Choice | Operation]]:
    """Collect the choices of all calls of chains and operators that modules of this model make inside this block, in their order.

    Calls in other threads and in compiled graphs are not collected.
    """
    recorder = _Recorder(model)
    token = _recorder.set(recorder)
    try:
        yield recorder.found
    finally:
        _recorder.reset(token)


def operated(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """A call of a public function of an operator, which ``recorded`` collects."""
    recorder = None if torch.compiler.is_compiling() else _recorder.get()
    if recorder is not None:
        explanation = explain(function, *args, **kwargs)
        recorder.found.append(Operation(recorder.place(), function.__name__, explanation))
    return function(*args, **kwargs)
