"""Validates a call against its declaration. An error lists every broken rule; a call that raises changes nothing.

Python types, shapes, dtypes and devices are always checked. Values (decays, offsets, slots) are read only on the CPU, because on
another device the host would wait for them; inside ``checks()`` they are read on every device.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import Complaints, DeviceError, DtypeError, PenstockWarning, RangeError, ShapeError, described, shortened
from . import private
from .declaration import Argument, Option, Options, Signature, Sizes, Wrong

Read: TypeAlias = Callable[[Argument, Tensor], Tensor | None]
"""The tensor of an argument whose values are checked, or None."""

_checking_values: ContextVar[bool] = ContextVar("penstock_checks", default=False)


@contextmanager
def checks() -> Iterator[None]:
    """Check values too, on every device, within this block.

    On a CPU values are always checked. On a GPU, decays that are positive or NaN, ``cu_seqlens`` that do not fit and slots out
    of range are only found inside this block, because reading them makes the host wait for the device.

    >>> with checks():
    ...     pass
    """
    token = _checking_values.set(True)
    try:
        yield
    finally:
        _checking_values.reset(token)


_known: ContextVar[str | None] = ContextVar("penstock_known", default=None)


@contextmanager
def known_values(name: str) -> Iterator[None]:
    """Skip checks of the values of the argument ``name`` inside this block: the caller computes valid values, except for NaN."""
    token = _known.set(name)
    try:
        yield
    finally:
        _known.reset(token)


def reads_values(tensor: Tensor) -> bool:
    """Whether values of this tensor are checked."""
    if not (tensor.is_cpu or _checking_values.get()) or private.is_fake(tensor):
        return False
    return not private.in_transform() and not private.tracing_derivatives() and not private.traced()


def check_types(signature: Signature, tensors: Sequence[object], options: Sequence[Option], values: Sequence[object]) -> None:
    """Raise unless all arguments have the right Python types and all options are valid."""
    complaints = Complaints(signature.function)
    for argument, x in zip(signature.arguments, tensors):
        optional = bool(argument.absent) or not (argument.required or argument.nullable)
        if not (isinstance(x, Tensor) or (x is None and (optional or argument.nullable))):
            remedy = "" if x is None else f"Convert it with torch.as_tensor({argument.public})."
            complaints.add(DtypeError, argument.public, "a torch.Tensor" + " or None" * optional, described(x), remedy)
        elif isinstance(x, Tensor) and x.is_nested:
            remedy = "Concatenate its parts along the tokens, and give cu_seqlens."
            complaints.add(DtypeError, argument.public, "a dense tensor", "a nested tensor", remedy)
        elif isinstance(x, Tensor) and hasattr(x, "device_mesh"):
            remedy = f"Pass {argument.public}.to_local(). Tokens that are cut over ranks need a context."
            complaints.add(DtypeError, argument.public, "the tensor of one rank", "a DTensor", remedy)
        elif isinstance(x, Tensor) and x.layout != torch.strided:
            complaints.add(DtypeError, argument.public, "a dense tensor", x.layout, f"Convert it with {argument.public}.to_dense().")
        elif isinstance(x, Tensor) and argument.written and not torch.compiler.is_compiling() and (x.is_neg() or x.is_conj()):
            rule, remedy = "memory that can be written", f"Resolve it with {argument.public}.resolve_neg()."
            complaints.add(RangeError, argument.public, rule, "a lazily negated or conjugated tensor", remedy)
        elif isinstance(x, Tensor) and argument.written and not torch.compiler.is_compiling() and private.is_lazy_zero(x):
            remedy = f"Clone {argument.public} first."
            complaints.add(RangeError, argument.public, "memory that can be written", "a tensor of zeros without memory", remedy)
    for option, value in zip(options, values):
        check_option(complaints, option, value)
    complaints.raise_any()


KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("True or False", (bool,)),
    "int": ("a whole number", (Integral, torch.SymInt)),
    "float": ("a number", (Real, torch.SymInt, torch.SymFloat)),
}


def check_option(complaints: Complaints, option: Option, value: object) -> None:
    """Check the Python type and the value of one option."""
    if value is None and option.optional:
        return
    rule, types = KINDS[option.kind]
    if not isinstance(value, types) or (isinstance(value, bool) and option.kind != "bool"):
        complaints.add(DtypeError, option.name, rule + " or None" * option.optional, described(value))
        return
    wrong = option.values(value) if option.values is not None else None
    if wrong is not None:
        complaints.add(RangeError, option.name, *wrong)


def finite(value: Any) -> Wrong | None:
    """For options: a finite float64 number."""
    large = isinstance(value, int) and abs(value) > sys.float_info.max
    if -math.inf < value < math.inf and not large:  # comparisons, since compiled graphs pass symbolic numbers
        return None
    return Wrong("finite", shortened(value))


def bind(signature: Signature, tensors: Sequence[Tensor | None]) -> dict[str, int] | None:
    """The size of each axis; None if tensors do not agree. Checks nothing else."""
    sizes: dict[str, int] = {}
    for argument, x in zip(signature.arguments, tensors):
        if x is None:
            if argument.otherwise is not None:
                sizes.setdefault(argument.otherwise[0], sizes[argument.otherwise[1]])
            continue
        shape, letters = x.shape, argument.letters
        if len(shape) != len(letters):
            return None
        for (axis, more), size in zip(letters, shape):
            if sizes.setdefault(axis, size - more) != size - more:
                return None
    return sizes


def check(signature: Signature, tensors: Sequence[Tensor | None], options: Options) -> dict[str, int]:
    """Validate tensors of the right Python types, whose call has valid options; return the size of each axis."""
    complaints, sizes = Complaints(signature.function), dict[str, int]()
    first = tensors[0]
    assert first is not None
    given = {argument.name: x for argument, x in zip(signature.arguments, tensors)}
    wrong: set[str] = set()
    for argument, x in zip(signature.arguments, tensors):
        before = len(complaints.found)
        if x is None:
            _check_absent(complaints, argument, sizes)
        elif argument.absent:
            complaints.add(ShapeError, argument.public, f"left out ({argument.absent})", list(x.shape))
        else:
            shared = given.get(argument.like)
            dtypes = argument.dtypes if shared is None or shared.dtype not in argument.dtypes else (shared.dtype,)
            _check_shape(complaints, argument, x, sizes)
            _check_kind(complaints, argument, x, dtypes, first.device, signature.arguments[0].public)
        if len(complaints.found) > before:
            wrong.add(argument.name)
    for axis in signature.nonempty.split():
        if sizes.get(axis) == 0:
            complaints.add(ShapeError, axis, "at least 1", 0)
    for rule in signature.rules:
        rule(complaints, {name: x for name, x in given.items() if name not in wrong}, sizes)
    right = [None if one.name in wrong else x for one, x in zip(signature.arguments, tensors)]
    _check_values(complaints, signature, right, sizes, options)
    complaints.raise_any()
    return sizes


INSIDE = ("penstock.call.", "penstock.compat.")
"""Modules between a caller and this one, besides those of the operator's family."""
_warned: set[str] = set()
"""Functions that have warned about a layout. Each warns once per process."""


def warn_of_layout(signature: Signature, tensors: Sequence[Tensor | None], sizes: Sizes, family: str) -> None:
    """Warn once if there are more heads than tokens and more than one token: the axes may be swapped.

    If another argument has only the axis of heads, as an initial state does, its shape would not match. Layers do not need the warning.
    ``family``: how the names of the family's modules begin.
    """
    if signature.layout is None or signature.function in _warned:
        return
    tokens, heads = signature.layout
    if not 1 < sizes[tokens] < sizes[heads]:
        return
    for argument, x in zip(signature.arguments, tensors):
        axes = argument.axes.split()
        if x is not None and heads in axes and tokens not in axes and not argument.derived:
            return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith((*INSIDE, family)):
        level, frame = level + 1, frame.f_back
    if frame.f_globals.get("__name__", "").startswith("penstock."):
        return
    _warned.add(signature.function)
    named = f"{sizes[heads]} heads and {sizes[tokens]} tokens"
    remedy = "Tokens come before heads, [B,T,H,K]: pass x.transpose(1, 2) for tensors [B,H,T,K]. If the shapes are right, ignore this."
    warnings.warn(f"{signature.function}: the tensors have {named}. {remedy}", PenstockWarning, stacklevel=level)


def readable(argument: Argument, x: Tensor) -> Tensor | None:
    """A tensor whose values are checked, or None: see ``reads_values`` and ``known_values``."""
    return x.detach() if argument.name != _known.get() and reads_values(x) else None


def check_values(signature: Signature, tensors: Sequence[Tensor | None], sizes: Sizes, options: Options, read: Read = readable) -> None:
    """Raise if values break a rule; shapes, dtypes and devices are known to be right. ``read``: see ``readable``."""
    complaints = Complaints(signature.function)
    _check_values(complaints, signature, tensors, sizes, options, read)
    complaints.raise_any()


def _check_values(
    complaints: Complaints, signature: Signature, tensors: Sequence[Tensor | None], sizes: Sizes, options: Options, read: Read = readable
) -> None:  # fmt: skip
    for argument, x in zip(signature.arguments, tensors):
        plain = read(argument, x) if argument.values is not None and x is not None else None
        wrong = argument.values(plain, sizes, options) if argument.values is not None and plain is not None else None
        if wrong is not None:
            complaints.add(RangeError, argument.public, *wrong)


def _check_absent(complaints: Complaints, argument: Argument, sizes: dict[str, int]) -> None:
    if argument.required and not argument.absent:
        complaints.add(ShapeError, argument.public, f"given, of shape {_bracketed(argument)}", "None")
    if argument.otherwise is not None and argument.otherwise[1] in sizes:
        sizes.setdefault(argument.otherwise[0], sizes[argument.otherwise[1]])


def _check_shape(complaints: Complaints, argument: Argument, x: Tensor, sizes: dict[str, int]) -> None:
    """Compare with the known sizes, and add new ones."""
    letters, shape = argument.letters, x.shape
    if len(shape) == len(letters):
        found = {axis: size - more for (axis, more), size in zip(letters, shape)}
        if all(size >= 0 for size in found.values()) and all(sizes.get(axis, size) == size for axis, size in found.items()):
            for axis, size in found.items():
                sizes.setdefault(axis, size)
            return
    wanted = ["*" if axis not in sizes else str(sizes[axis] + more) for axis, more in letters]
    known = "" if all(size == "*" for size in wanted) else f" = [{', '.join(wanted)}]"
    hint = argument.hint(x, sizes) if callable(argument.hint) else argument.hint
    complaints.add(ShapeError, argument.public, f"of shape {_bracketed(argument)}{known}", list(shape), hint)


def _check_kind(
    complaints: Complaints, argument: Argument, x: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device, first: str
) -> None:
    name = argument.public
    if x.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        complaints.add(DtypeError, name, allowed, x.dtype, f"Convert it with {name}.to(...).")
    if x.device != device:
        complaints.add(DeviceError, name, f"on {device}, where {first} is", x.device, f"Move it with {name}.to({str(device)!r}).")


def check_tensor(complaints: Complaints, argument: Argument, x: Tensor, sizes: dict[str, int], device: torch.device, beside: str) -> None:
    """Check shape, dtype and device of one argument outside a declaration. ``beside``: the name of a tensor on ``device``."""
    _check_shape(complaints, argument, x, sizes)
    _check_kind(complaints, argument, x, argument.dtypes, device, beside)


def _bracketed(argument: Argument) -> str:
    return f"[{','.join(argument.axes.split())}]"


def check_in_place(signature: Signature, tensors: Sequence[Tensor | None], kept: dict[Any, Any]) -> None:
    """Raise unless the written argument can be written: no gradients, no overlap, no memory shared with another argument.

    ``kept`` caches, for equal calls, the number of bytes that each tensor spans.
    """
    spans = kept.get("spans")
    if spans is None:
        spans = [0 if x is None or private.is_fake(x) else reach(x) for x in tensors]
        target = tensors[signature.written]
        if target is not None and overlaps(target):
            _raise_in_place(signature, tensors, spans)
        kept["spans"] = spans
    begin = end = 0
    if spans[signature.written]:
        begin = tensors[signature.written].data_ptr()  # type: ignore[union-attr]
        end = begin + spans[signature.written]
    gradients = torch.is_grad_enabled()
    if _is_frozen(tensors[signature.written]):  # type: ignore[arg-type]
        _raise_in_place(signature, tensors, spans)
    for place, x in enumerate(tensors):
        if x is not None:
            if gradients and x.requires_grad:
                _raise_in_place(signature, tensors, spans)
            if spans[place] and place != signature.written and begin - spans[place] < x.data_ptr() < end:
                _raise_in_place(signature, tensors, spans)


def _raise_in_place(signature: Signature, tensors: Sequence[Tensor | None], spans: Sequence[int]) -> None:
    complaints = Complaints(signature.function)
    written, target = signature.arguments[signature.written], tensors[signature.written]
    assert target is not None
    if overlaps(target):
        value = f"strides {list(target.stride())} over shape {list(target.shape)}"
        complaints.add(RangeError, written.public, "free of overlap, since it is written in place", value, "Clone it first.")
    if _is_frozen(target):
        rule = "made outside of torch.inference_mode() if it is written outside of it"
        complaints.add(RangeError, written.public, rule, "an inference tensor", "Clone it first.")
    begin = target.data_ptr() if spans[signature.written] else 0
    end = begin + spans[signature.written]
    for argument, x, size in zip(signature.arguments, tensors, spans):
        if x is None:
            continue
        if torch.is_grad_enabled() and x.requires_grad:
            remedy = "There is no backward pass through an update in place: use torch.no_grad(), or a function over sequences."
            complaints.add(RangeError, argument.public, "free of gradients", "requires_grad=True with gradients enabled", remedy)
        if size and argument is not written and x.data_ptr() < end and begin < x.data_ptr() + size:
            rule, remedy = "in memory of its own, since it is written in place", f"Clone {argument.public} first."
            complaints.add(RangeError, written.public, rule, f"memory of {argument.public}", remedy)
    complaints.raise_any()


def _is_frozen(x: Tensor) -> bool:
    """Whether a tensor was made in inference mode and is used outside of it."""
    return not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled()


def overlaps(x: Tensor, expanded: bool = True) -> bool:
    """Whether two elements may share memory: the stride of some axis is smaller than the span of the axes with smaller strides.

    ``expanded``: whether strides of 0 count.
    """
    span = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size > 1 and (stride or expanded)):
        if stride < span:
            return True
        span += stride * (size - 1)
    return False


def reach(x: Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    last = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape))
    return (last + 1) * x.element_size() if x.numel() else 0
