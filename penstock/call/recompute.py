"""Selective recomputation: the backward pass recomputes tensors whose memory is worth more than the time to recompute them.

A linear map saves its input for the gradient of its weight. If the input is an element-wise function of tensors that are saved anyway, it
can be recomputed instead. The same holds for the states inside recurrences, which are functions of their inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import private
from .autocast import autocasting

R = TypeVar("R", bound="Tensor | tuple[Tensor, ...]")
Function = Callable[..., "Tensor | tuple[Tensor, ...]"]


@contextmanager
def recomputing() -> Iterator[None]:
    """Inside this block, autograd saves the inputs of ``again`` instead of its results, and recurrences save no residuals.

    Results are bitwise equal. So are gradients, with two exceptions. Gradients through recurrences are only equally accurate. Under
    autocast, gradients of a weight that is used several times are summed in the weight's dtype; autocast's cache sums them in its own.

    Saved-tensor hooks set outside get the tensors that are saved. The block has no effect inside hooks that are set inside it, and in
    compiled graphs, whose compiler decides what to save.
    """
    if torch.compiler.is_compiling():
        yield
        return
    saved = _Saved(private.saved_tensor_hooks())
    token = _saved.set(saved)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            yield
    finally:
        _saved.reset(token)
        saved.known.clear()


def active() -> bool:
    """Whether code runs inside ``recomputing``, not in a compiled graph, and not inside further saved-tensor hooks.

    Such hooks may be those of a checkpoint, whose code must save the same tensors when it runs again, outside ``recomputing``.
    """
    return not torch.compiler.is_compiling() and _innermost() is not None


def _innermost() -> _Saved | None:
    saved = _saved.get()
    if saved is None:
        return None
    hooks = private.saved_tensor_hooks()
    return saved if hooks is None or hooks[0] == saved.pack else None  # None: unknown


def again(results: R, function: Function, *inputs: Tensor | None) -> R:
    """The given results of ``function(*inputs)``. Inside ``recomputing``, the backward pass calls the function to recompute them.

    The function must return the same bits and strides, and must not hold tensors itself. It is called without gradients, under the current
    autocast. Results that require no gradients, that are also inputs, or that are changed in place later are saved.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return results
    saved = _innermost()
    if saved is not None:
        saved.add(results if isinstance(results, tuple) else (results,), function, inputs)
    return results


class _Saved:
    """The saved-tensor hooks of one ``recomputing``, and the results that need not be saved."""

    def __init__(self, outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None) -> None:
        self.known: dict[int, _Known] = {}
        """Results by the address of their storage."""
        self._outer = outer

    def add(self, results: Sequence[Tensor], function: Function, inputs: Sequence[Tensor | None]) -> None:
        if not any(type(x) is Tensor and x.requires_grad for x in results):
            return  # all are saved; tensors of other types may have no memory
        given = [None if x is None else x.detach() for x in inputs]
        kind = results[0].device.type
        call = _Call(function, [None if x is None else _Input(self.pack(x), x.stride()) for x in given], kind)
        apart = {x.untyped_storage().data_ptr() for x in given if x is not None}
        for n, x in enumerate(results):
            storage = x.untyped_storage()
            if type(x) is Tensor and x.requires_grad and storage.data_ptr() not in apart:
                self.known[storage.data_ptr()] = _Known(weakref.ref(storage), x.dtype, x._version, call, n)

    def pack(self, x: Tensor) -> _Again | _Kept:
        if type(x) is Tensor:
            storage = x.untyped_storage()
            known = self.known.get(storage.data_ptr())
            if known is not None and known.storage() is storage and known[1:3] == (x.dtype, x._version) and not x.is_neg():
                known.call.uses += 1
                return _Again(known.call, known.result, x.shape, x.stride(), int(x.storage_offset()))
        if self._outer is not None:
            return _Kept(self._outer[0](x), 0, self._outer[1])
        # a node's saved results must not reference the node: such a cycle would never be freed
        return _Kept(x if x.grad_fn is None else x.detach(), x._version, None)

    @staticmethod
    def unpack(packed: _Again | _Kept) -> Tensor:
        return packed.tensor()


class _Known(NamedTuple):
    """A result of a call."""

    storage: weakref.ref[torch.UntypedStorage]
    dtype: torch.dtype
    version: int
    call: _Call
    result: int


class _Kept(NamedTuple):
    """A tensor, or its replacement by outer hooks."""

    kept: Any
    version: int
    unpack: Callable[[Any], Tensor] | None

    def tensor(self) -> Tensor:
        if self.unpack is not None:
            return self.unpack(self.kept)
        x: Tensor = self.kept
        if x._version != self.version:  # with hooks, autograd does not check it
            raise RuntimeError(
                f"backward: a tensor {list(x.shape)} that is needed for gradients was modified in place: it is at version {x._version}, "
                f"expected {self.version}. Modify a copy, or modify it after the backward pass."
            )
        return x


class _Input(NamedTuple):
    """An input of a call, and its strides, which determine the strides of results."""

    packed: _Again | _Kept
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        x = self.packed.tensor()
        if x.stride() == self.stride:
            return x
        # outer hooks changed them
        written = x[tuple(slice(None) if step else slice(1) for step in self.stride)]
        return x.new_empty_strided(written.shape, self.stride).copy_(written).as_strided(x.shape, self.stride)


class _Again(NamedTuple):
    """A view of a recomputed result."""

    call: _Call
    result: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.call.result(self.result).as_strided(self.shape, self.stride, self.offset)


class _Call:
    """A call of a function. Its results are in memory from the first use to the last one, or to the end of a backward pass."""

    def __init__(self, function: Function, inputs: list[_Input | None], kind: str) -> None:
        self.uses = 0
        self._function, self._inputs = function, inputs
        self._found: tuple[Tensor, ...] | None = None
        self._left = 0
        self._kind, self._autocast = kind, torch.get_autocast_dtype(kind) if autocasting(kind) else None

    def result(self, n: int) -> Tensor:
        found = self._found
        if found is None:
            with torch.no_grad(), self._autocast_as_then():
                results = self._function(*[None if x is None else x.tensor() for x in self._inputs])
            found = results if isinstance(results, tuple) else (results,)
            this = weakref.ref(self)  # does not keep the inputs alive until then
            if self.uses > 1 and private.at_end_of_backward(lambda: None if (call := this()) is None else call.forget()):
                self._found, self._left = found, self.uses
        self._left -= 1
        if self._left <= 0:
            self.forget()
        return found[n]

    def forget(self) -> None:
        self._found = None

    def _autocast_as_then(self) -> AbstractContextManager[object]:
        if self._autocast is not None:
            return torch.autocast(self._kind, dtype=self._autocast)
        return torch.autocast(self._kind, enabled=False) if autocasting(self._kind) else nullcontext()


_saved: ContextVar[_Saved | None] = ContextVar("penstock_recompute", default=None)
