"""Checks of the arguments of mixers. They run before anything is computed or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..call.declaration import FLOATS, INDICES, Argument
from ..call.private import in_transform, is_fake, is_lazy_zero
from ..call.validation import check_tensor, overlaps, reach, reads_values
from ..errors import Complaints, DtypeError, RangeError, ShapeError, described
from ..tokens.context import ContextParallel
from ..tokens.packing import offsets
from ..tokens.pools import rows


def check_input(complaints: Complaints, x: object, hidden_size: int) -> None:
    """Check the input x [B,T,hidden_size] of a mixer."""
    if not isinstance(x, Tensor):
        complaints.add(DtypeError, "x", "a torch.Tensor", described(x))
    else:
        hint = "One sequence is x[None]. C is the hidden_size of the mixer."
        check_tensor(complaints, Argument("x", "B T C", FLOATS, hint=hint), x, {"C": hidden_size}, x.device, "x")


def check_sequences(complaints: Complaints, x: Tensor, cu_seqlens: object, slots: object, state: object, name: str) -> None:
    """Check the offsets of packed sequences and the rows of a pool, for tokens x [B,T] or [B,T,C] with this name."""
    B, T = x.shape[:2]
    sizes = {"B": B, "T": T}
    if cu_seqlens is None:
        sizes["N"] = B
    elif _is_tensor(cu_seqlens, "cu_seqlens", complaints):
        if B != 1:
            complaints.add(ShapeError, "B", "1 with cu_seqlens", B, "Pack all sequences along the token axis.")
        check_tensor(complaints, Argument("cu_seqlens", "N+1", INDICES), cu_seqlens, sizes, x.device, name)
    if slots is not None and _is_tensor(slots, "slots", complaints):
        check_tensor(complaints, Argument("slots", "N", INDICES), slots, sizes, x.device, name)
    if complaints.found or torch.compiler.is_compiling():
        return
    rows_of_pool = next((one.shape[0] for _, one in named_tensors(state, pages=False) if one.dim()), None)
    if rows_of_pool is not None:
        sizes["P"] = rows_of_pool
    for argument, given, rule in (("cu_seqlens", cu_seqlens, offsets("T")), ("slots", slots, rows)):
        if isinstance(given, Tensor) and reads_values(given):
            wrong = rule(given, sizes, {})
            if wrong is not None:
                complaints.add(RangeError, argument, *wrong)


def check_context(complaints: Complaints, context: object, x: Tensor, cu_seqlens: object, name: str) -> None:
    """Check the context of tokens x [B,T] or [B,T,C] with this name, which are those of this rank."""
    if not isinstance(context, ContextParallel):
        complaints.add(DtypeError, "context", "a ContextParallel or None", described(context), "See penstock.distributed.")
        return
    B, T = x.shape[:2]
    if context.offsets is not None and B != 1:
        complaints.add(ShapeError, "B", "1 with cu_seqlens", B, "Pack all sequences along the token axis.")
    context.check(complaints, name, T, cu_seqlens)


def _is_tensor(value: object, name: str, complaints: Complaints) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor):
        complaints.add(DtypeError, name, "a torch.Tensor or None", described(value))
    return isinstance(value, Tensor)


def named_tensors(state: object, name: str = "state", *, pages: bool = True) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a state with their names, as ``state[3].mixer.shift``; without ``pages``, those whose first axis is the row."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, tuple) and hasattr(state, "_fields"):
        for field, one in zip(state._fields, state):
            if pages or field not in getattr(state, "fields_of_pages", ()):
                yield from named_tensors(one, f"{name}.{field}", pages=pages)
    elif isinstance(state, list | tuple):
        for n, one in enumerate(state):
            yield from named_tensors(one, f"{name}[{n}]", pages=pages)


def mapped(state: Any, function: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """A state with the results of ``function`` for all parts of a kind, in the order of ``named_tensors``. Other tensors and None stay."""
    if isinstance(state, kind):
        return function(state)
    if state is None or isinstance(state, Tensor):
        return state
    parts = [mapped(one, function, kind) for one in state]
    return type(state)(*parts) if hasattr(state, "_fields") else parts


def check_part(
    complaints: Complaints, name: str, state: object, wanted: Any, sizes: dict[str, int], written: bool, owner: str
) -> None:  # fmt: skip
    """Check a state, or a part of one, against ``wanted``, a state of no sequences: types, sizes, dtypes and device, which is the owner's.

    The first axis has ``sizes["N"]`` rows; without "N", any number that is the same everywhere. Other rules: see a model's ``check_state``.
    A pool may be in pages, where ``wanted`` has such a form (``paged``).
    """
    if not isinstance(wanted, Tensor):
        if written and hasattr(wanted, "paged") and isinstance(state, type(wanted.paged())):
            wanted = wanted.paged()
        if not isinstance(state, type(wanted)):
            complaints.add(DtypeError, name, f"a {type(wanted).__name__}", type(state).__name__)
            return
        pages: dict[str, int] = {}
        for field, one, other in zip(wanted._fields, state, wanted):
            own = pages if field in getattr(wanted, "fields_of_pages", ()) else sizes
            check_part(complaints, f"{name}.{field}", one, other, own, written, owner)
        return
    if not isinstance(state, Tensor):
        complaints.add(DtypeError, name, "a torch.Tensor", described(state))
        return
    shape = [sizes.setdefault("N", state.shape[0]) if state.dim() else 0, *wanted.shape[1:]]
    if state.dim() != wanted.dim() or any(
        size != known and (known or axis == 0) for axis, (size, known) in enumerate(zip(state.shape, shape))
    ):
        remedy = f"initial_state({shape[0]}) makes one for these sequences{'; slots name the rows of a larger one' * written}."
        complaints.add(ShapeError, name, f"of shape {shape}", list(state.shape), remedy)
    dtypes = FLOATS if wanted.dtype.is_floating_point else (wanted.dtype,)
    axes = " ".join(f"x{n}" for n in range(state.dim()))
    check_tensor(complaints, Argument(name, axes, dtypes), state, {}, wanted.device, owner)
    if written:
        _check_writable(complaints, name, state)


def check_apart(complaints: Complaints, state: object) -> None:
    """Check that no two tensors of a state share memory."""
    named = [] if in_transform() else [(name, x) for name, x in named_tensors(state) if x.numel() and not is_fake(x)]
    for (name, x), (other, y) in pairwise(sorted(named, key=lambda pair: pair[1].data_ptr())):
        if y.data_ptr() < x.data_ptr() + reach(x) and (x.is_contiguous() or x.data_ptr() == y.data_ptr()):
            complaints.add(RangeError, other, "in memory of its own, since it is written in place", f"memory of {name}", "Clone it first.")


def _check_writable(complaints: Complaints, name: str, x: Tensor) -> None:
    if not torch.compiler.is_compiling() and (x.is_neg() or x.is_conj() or is_lazy_zero(x)):
        complaints.add(
            RangeError,
            name,
            "memory that can be written",
            "a lazily negated or conjugated tensor, or zeros without memory",
            "Clone it first.",
        )
    if overlaps(x):
        value = f"strides {list(x.stride())} over shape {list(x.shape)}"
        complaints.add(RangeError, name, "free of overlap, because it is written in place", value, "Clone it first.")
    if not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled():
        rule = "made outside of torch.inference_mode() if it is written outside of it"
        complaints.add(RangeError, name, rule, "an inference tensor", "Clone it first.")
