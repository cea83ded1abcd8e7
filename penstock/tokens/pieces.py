"""Updates states in place by forward passes, for implementations in plain PyTorch.

The state of a row after p tokens is a function of these tokens alone: the first 64 floor(p / 64) tokens are processed in pieces of 64 from
the beginning of the row, the rest token by token, and the state is rounded to the pool's dtype after each piece. So results do not depend
on where a sequence is cut if cuts are at multiples of 64, nor on the other rows of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .dtypes import state_dtype
from .problem import InPlace

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK = 64


def pieces(tokens: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each piece of a row with this number of tokens."""
    whole = tokens // CHUNK * CHUNK
    yield from ((begin, begin + CHUNK) for begin in range(0, whole, CHUNK))
    yield from ((begin, begin + 1) for begin in range(whole, tokens))


def advance_by(forward: Callable[[Any], Sequence[Tensor | None]], a: InPlace) -> Tensor:
    """The output. States are copied out of the pool and back. Waits for the device to read slots and offsets."""
    output = a.v.new_zeros(a.v.shape)
    slots = list(range(a.sizes["N"])) if a.slots is None else a.slots.tolist()
    live = [(n, slot) for n, slot in enumerate(slots) if slot >= 0]
    if a.cu_seqlens is None:  # all rows have the same length and run together
        together = [([n for n, _ in live], [slot for _, slot in live], 0, a.sizes["T"])] if live else []
    else:
        spans = a.spans()
        together = [([0], [slot], *spans[n]) for n, slot in live]
    for rows, taken, first, last in together:
        state = a.state[taken]
        for begin, end in pieces(last - first):
            piece = _piece(a, rows, slice(first + begin, first + end), state)
            o, state = forward(piece)  # type: ignore[assignment]
            output[rows, first + begin : first + end] = o  # type: ignore[assignment]
            state = state.to(a.state.dtype)
        a.state[taken] = state
    return output


def _piece(a: InPlace, rows: list[int], tokens: slice, state: Tensor) -> Any:
    """The call over some tokens of some rows, from their states."""
    operator = a.sequences
    signature = next(one for one in operator.signatures.values() if one.about is a.signature.about)
    state = state.to(torch.promote_types(state.dtype, state_dtype(a.q.dtype))).contiguous()  # products depend on the layout
    given: dict[str, Tensor | None] = {"initial_state": state, "cu_seqlens": None}
    for name, axes in signature.axes.items():
        if name not in given:
            x: Tensor | None = getattr(a, name)
            given[name] = x[rows, tokens] if x is not None and axes[:2] == ("B", "T") else x
    options = {one.name: getattr(a, one.name) for one in a.operator.options} | {"reverse": False, "output_final_state": True}
    sizes = {**a.sizes, "B": len(rows), "N": len(rows), "T": tokens.stop - tokens.start}
    return operator.problem.of(operator, signature, [given[name] for name in operator.names], options, sizes)
