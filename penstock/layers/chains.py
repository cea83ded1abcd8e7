"""Fused chains as ordered lists of forms: kernels, and the formula in plain PyTorch as the last form.

A chain is a few operations of a layer between two matrix products, or a matrix product itself. A call of a chain runs the first form that
does not refuse it. The last form takes every call. A form of other chains may find none of their kernels: it returns None, having done
nothing, and the next one runs. ``recorded`` collects which forms run, and why not those before them. ``penstock check``
and the contract tests compare every form but the last with the chain's formula, on the examples of the form.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from ..call.dispatch import Explanation
from ..call.implementation import Listed
from ..call.operator import explain
from . import cpu
from .examples import Example
from .triton import absent

C = TypeVar("C")
R = TypeVar("R")


NOTHING_RAN = "its chains run no kernel for this call"
"""Why the next form runs after one that returned None."""


def never(call: Any) -> str | None:
    """The default of ``refuses``: takes every call."""
    return None


def no_kernels(call: Any) -> tuple[str, ...]:
    """``kernels`` of a form that launches none: plain PyTorch, other chains, or native kernels of a CPU."""
    return ()


def everywhere(device: torch.device) -> str | None:
    """``absent`` of a form that has code for every device."""
    return None


def as_returned(call: Any, returned: Any) -> Any:
    """The default of ``results``."""
    return returned


def launches(*forward: str, backward: tuple[str, ...] = ()) -> Callable[[Any], tuple[str, ...]]:
    """``kernels`` of a form that always launches these, the last ones in its backward pass."""
    return lambda call: forward + backward if torch.is_grad_enabled() else forward


@dataclass(frozen=True)
class ChainForm(Generic[C, R]):
    """One way to compute a chain: by Triton kernels, unless it is made by ``plain``."""

    name: str
    run: Callable[[C], R | None]
    """Computes the chain. None, unless it is the last form: it did nothing, see ``NOTHING_RAN``."""
    refuses: Callable[[C], str | None]
    """Why it cannot compute a call, or None."""
    kernels: Callable[[C], tuple[str, ...]]
    """The kernels that a call launches, as profiles show them, with those of its backward pass if gradients are enabled."""
    examples: tuple[Example, ...] = ()
    """Small calls in its domain."""
    absent: Callable[[torch.device], str | None] = absent
    """Why a device has no code of it, or None. By default that of Triton kernels for every GPU."""
    compiles: bool = False
    """Whether compiled graphs ask it. Others are eager: graphs cannot trace their launches."""


def plain(
    name: str, run: Callable[[C], R | None], refuses: Callable[[C], str | None] = never, examples: tuple[Example, ...] = (),
    absent: Callable[[torch.device], str | None] = everywhere,
) -> ChainForm[C, R]:  # fmt: skip
    """A form without Triton kernels of its own, which compiled graphs ask, too."""
    return ChainForm(name, run, refuses, no_kernels, examples, absent, compiles=True)


def native(
    name: str, function: str, run: Callable[[C], R | None], refuses: Callable[[C], str | None], examples: tuple[Example, ...]
) -> ChainForm[C, R]:  # fmt: skip
    """A form by a function of the native library of a CPU. Compiled graphs do not ask it: they cannot trace its call."""
    return ChainForm(name, run, refuses, no_kernels, examples, partial(cpu.absent, function))


class Chain(Generic[C, R]):
    """An ordered list of forms. ``C`` is a ``NamedTuple`` of the arguments of a call."""

    def __init__(
        self, name: str, *forms: ChainForm[C, R], formula: Callable[[C], Any] | None = None, results: Callable[[C, R], Any] = as_returned
    ) -> None:
        """Make a chain known to all tools.

        formula : function of a call, optional
            The results in plain PyTorch. By default those of the last form.
        results : function of a call and of what a form returns
            What a caller gets: tensors, in tuples and lists, with those that are updated in place.
        """
        names, last = [form.name for form in forms], forms[-1]
        if name in CHAINS or len(set(names)) < len(names):
            raise ValueError(f"Chain: name must be new, and those of its forms differ, got {name} of {', '.join(names)}. Rename one.")
        if last.refuses is not never or not last.compiles:
            raise ValueError(f"Chain: forms must end with a plain one that takes every call, got {last.name} of {name}. Add one.")
        self.name, self.forms = name, forms
        self._eager = tuple((form.refuses, form.run) for form in forms[:-1])
        self._compiled = tuple((form.refuses, form.run) for form in forms[:-1] if form.compiles)
        self._last: Callable[[C], R] = last.run  # type: ignore[assignment]
        self._formula, self._results = formula, results
        CHAINS[name] = self

    def __call__(self, call: C) -> R:
        """The result of the first form that does not refuse a call."""
        if torch.compiler.is_compiling():
            forms = self._compiled
        else:
            recorder = _recorder.get()
            if recorder is not None:
                return recorder.run(self, call)
            forms = self._eager
        for refuses, run in forms:
            if refuses(call) is None and (found := run(call)) is not None:
                return found
        return self._last(call)

    def form(self, name: str) -> ChainForm[C, R]:
        """The form of this name, which must exist."""
        return next(one for one in self.forms if one.name == name)

    def listed(self) -> tuple[Listed, ...]:
        """The forms that are compared with the formula: all but the last."""
        return tuple(Listed("forward", one.name, one.examples, one.absent) for one in self.forms[:-1])

    def computed(self, call: C, form: str | None = None) -> Any:
        """The results by a form, which must take the call, or by the formula. None if the form did nothing."""
        if form is not None:
            found = self.form(form).run(call)
            return None if found is None and form != self.forms[-1].name else self._results(call, found)  # type: ignore[arg-type]
        return self._results(call, self._last(call)) if self._formula is None else self._formula(call)


CHAINS: dict[str, Chain[Any, Any]] = {}
"""All chains, by name."""


class Choice(NamedTuple):
    """The form that computed one call of a chain."""

    module: str
    """The name of the module that called the chain, or of the one that the chain computes. Empty for the model itself."""
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
        reasons: tuple[tuple[str, str], ...] = ()
        place, end, module = len(self.found), len(self.found), self.place(call)
        for form in chain.forms:
            reason = form.refuses(call)
            if reason is None:
                self.found[place:end] = [Choice(module, chain.name, form.name, form.kernels(call), reasons)]
                found, end = form.run(call), place + 1  # the next form takes the place of one that did nothing
                if found is not None:
                    return found
                reason = NOTHING_RAN
            reasons += ((form.name, reason),)
        return found  # type: ignore[return-value]

    def place(self, call: Any = None) -> str:
        """The name of the module of a call, or of its norm, else of the innermost module one of whose methods is running.

        Hooks would tell it, too, but a module with hooks runs other forms.
        """
        name = self.names.get(id(getattr(call, "module", getattr(call, "norm", None))))
        frame = sys._getframe()
        while name is None and frame.f_back is not None:
            frame = frame.f_back
            name = self.names.get(id(frame.f_locals.get("self")))
        return name or ""


_recorder: ContextVar[_Recorder | None] = ContextVar("penstock_chains", default=None)


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


def operated(function: Callable[..., R], *args: Any, explained: dict[str, Any] | None = None, **kwargs: Any) -> R:
    """A call of a public function of an operator, which ``recorded`` collects.

    ``explained``: other options for the explanation, if those of the call would exchange tensors with other ranks.
    """
    recorder = None if torch.compiler.is_compiling() else _recorder.get()
    if recorder is not None:
        explanation = explain(function, *args, **{**kwargs, **(explained or {})})
        recorder.found.append(Operation(recorder.place(), function.__name__, explanation))
    return function(*args, **kwargs)
