"""Checks of the arguments of mixers. They run before anything is computed or written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import Tensor

from ..call.declaration import FLOATS, INDICES, Argument
from ..call.validation import check_tensor, offsets, reads_values
from ..errors import Complaints, DtypeError, RangeError, ShapeError, described
from ..recurrence.declaration import rows


def check_input(complaints: Complaints, x: object) -> None:
    """Check the input x [B,T,C] of a mixer."""
    if not isinstance(x, Tensor):
        complaints.add(DtypeError, "x", "a torch.Tensor", described(x))
    else:
        check_tensor(complaints, Argument("x", "B T C", FLOATS, hint="One sequence is x[None]."), x, {}, x.device, "x")


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
    rows_of_pool = next((one.shape[0] for _, one in named_tensors(state) if one.dim()), None)
    if rows_of_pool is not None:
        sizes["P"] = rows_of_pool
    for argument, given, rule in (("cu_seqlens", cu_seqlens, offsets("T")), ("slots", slots, rows)):
        if isinstance(given, Tensor) and reads_values(given):
            wrong = rule(given, sizes)
            if wrong is not None:
                complaints.add(RangeError, argument, *wrong)


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
