"""Checks of the arguments of models: tokens, states and numbers. They run before anything is computed or written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..call.declaration import FLOATS, INDICES, Argument
from ..call.private import is_lazy_zero
from ..call.validation import check_tensor, offsets, overlaps, reach, reads_values
from ..errors import Complaints, DtypeError, RangeError, ShapeError, described, shortened
from ..recurrence.declaration import rows

MODEL = "the model"


def check_whole(complaints: Complaints, name: str, value: object, least: int) -> None:
    """Check a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        complaints.add(DtypeError, name, "a whole number", described(value))
    elif value < least:
        complaints.add(RangeError, name, f"a whole number of at least {least}", value)
    elif value >= 2**63:
        complaints.add(RangeError, name, "a whole number below 2^63", shortened(value))


def check_tokens(complaints: Complaints, ids: Tensor, vocab_size: int, device: torch.device) -> None:
    """Check token indices [B,T] on the model's device; their values only if ``reads_values`` allows it, and not in compiled graphs."""
    found = len(complaints.found)
    if not isinstance(ids, Tensor):
        complaints.add(DtypeError, "ids", "a torch.Tensor", described(ids), "Make one with torch.tensor([[...]]).")
        return
    remedy = "One sequence is ids[None]."
    check_tensor(complaints, Argument("ids", "B T", INDICES, hint=remedy), ids, {}, device, MODEL)
    if len(complaints.found) > found or torch.compiler.is_compiling() or not reads_values(ids) or ids.numel() == 0:
        return
    least, most = (int(x) for x in ids.aminmax())
    if least < 0 or most >= vocab_size:
        value = least if least < 0 else most
        complaints.add(RangeError, "ids", f"from 0 to {vocab_size - 1}", value, "Use the tokenizer that belongs to the model.")


def check_sequences(complaints: Complaints, ids: Tensor, cu_seqlens: object, slots: object, state: object) -> None:
    """Check the offsets of packed sequences and the rows of a pool."""
    B, T = ids.shape
    sizes = {"B": B, "T": T}
    if cu_seqlens is None:
        sizes["N"] = B
    elif _is_tensor(cu_seqlens, "cu_seqlens", complaints):
        if B != 1:
            complaints.add(ShapeError, "B", "1 with cu_seqlens", B, "Pack all sequences along the token axis.")
        check_tensor(complaints, Argument("cu_seqlens", "N+1", INDICES), cu_seqlens, sizes, ids.device, "ids")
    if slots is not None and _is_tensor(slots, "slots", complaints):
        check_tensor(complaints, Argument("slots", "N", INDICES), slots, sizes, ids.device, "ids")
    if complaints.found or torch.compiler.is_compiling():
        return
    rows_of_pool = next((x.shape[0] for _, x in named_tensors(state) if x.dim()), None)
    if rows_of_pool is not None:
        sizes["P"] = rows_of_pool
    for name, x, rule in (("cu_seqlens", cu_seqlens, offsets("T")), ("slots", slots, rows)):
        if isinstance(x, Tensor) and reads_values(x):
            wrong = rule(x, sizes)
            if wrong is not None:
                complaints.add(RangeError, name, *wrong)


def _is_tensor(value: object, name: str, complaints: Complaints) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor):
        complaints.add(DtypeError, name, "a torch.Tensor or None", described(value))
    return isinstance(value, Tensor)


def named_tensors(state: object, name: str = "state") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a state with their names, as ``state[3].mixer.shift``."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, tuple) and hasattr(state, "_fields"):
        for field, one in zip(state._fields, state):
            yield from named_tensors(one, f"{name}.{field}")
    elif isinstance(state, list | tuple):
        for n, one in enumerate(state):
            yield from named_tensors(one, f"{name}[{n}]")


def marks(state: object, *others: object) -> tuple[object, ...] | None:
    """Everything that the check of a pool depends on: equal marks need no second check. None if they cannot be read.

    ``others`` are what else it depends on.
    """
    if torch.compiler.is_compiling() or not isinstance(state, list | tuple):
        return None
    found: list[object] = [torch.is_inference_mode_enabled(), len(state), *others]
    try:
        for one in state:
            for part in (one.mixer, one.channel):
                found.append(type(part))
                for x in part:
                    found += (type(x), x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x.is_neg(), x.is_inference())
    except (AttributeError, TypeError, RuntimeError):  # no such state: the check names what is wrong
        return None
    return tuple(found)


def check_state(complaints: Complaints, state: object, wanted: Sequence[Any], count: int | None, written: bool) -> None:
    """Check the states of all layers against ``wanted``, states of no sequences: types, sizes, dtypes and device.

    The first axis has ``count`` rows; None: any number, the same everywhere. A size of 0 in ``wanted`` fits any size (a cache has room
    for any number of tokens). Floating-point states may have any floating dtype. A state that is written must not overlap itself.
    """
    if not isinstance(state, list | tuple) or hasattr(state, "_fields"):
        remedy = "Pass the state that the model or its initial_state returned."
        complaints.add(DtypeError, "state", "a list of LayerState", described(state), remedy)
        return
    if len(state) != len(wanted):
        complaints.add(ShapeError, "state", f"one LayerState for each of {len(wanted)} layers", len(state))
        return
    sizes: dict[str, int] = {} if count is None else {"N": count}
    for n, (one, other) in enumerate(zip(state, wanted)):
        _check_part(complaints, f"state[{n}]", one, other, sizes, written)
        if complaints.found:
            return  # the states of other layers are usually wrong in the same way
    if written and not torch.compiler.is_compiling():
        _check_apart(complaints, state)


def _check_part(complaints: Complaints, name: str, state: object, wanted: Any, sizes: dict[str, int], written: bool) -> None:
    if not isinstance(wanted, Tensor):
        if not isinstance(state, type(wanted)):
            complaints.add(DtypeError, name, f"a {type(wanted).__name__}", type(state).__name__)
            return
        for field, one, other in zip(wanted._fields, state, wanted):
            _check_part(complaints, f"{name}.{field}", one, other, sizes, written)
        return
    if not isinstance(state, Tensor):
        complaints.add(DtypeError, name, "a torch.Tensor", described(state))
        return
    shape = [sizes.setdefault("N", state.shape[0]) if state.dim() else 0, *wanted.shape[1:]]
    if state.dim() != wanted.dim() or any(
        size != known and (known or axis == 0) for axis, (size, known) in enumerate(zip(state.shape, shape))
    ):
        remedy = f"initial_state({shape[0]}) makes one for these sequences."
        complaints.add(ShapeError, name, f"of shape {shape}", list(state.shape), remedy)
    dtypes = FLOATS if wanted.dtype.is_floating_point else (wanted.dtype,)
    axes = " ".join(f"x{n}" for n in range(state.dim()))
    check_tensor(complaints, Argument(name, axes, dtypes), state, {}, wanted.device, MODEL)
    if written:
        _check_writable(complaints, name, state)


def _check_apart(complaints: Complaints, state: Sequence[Any]) -> None:
    """Check that no two tensors of a state share memory."""
    named = [(name, x) for name, x in named_tensors(state) if x.numel()]
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
