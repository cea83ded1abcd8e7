"""Packed sequences: concatenated along the token axis of one batch row, with the offsets ``cu_seqlens``."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor

from ..call.declaration import INDICES, Argument, Options, Sizes, Values, Wrong
from ..errors import Complaints, ShapeError


def offsets(axis: str) -> Values:
    """The rule for values of ``cu_seqlens``: the begins of packed sequences along ``axis``, then its end."""

    def values(x: Tensor, sizes: Sizes, options: Options) -> Wrong | None:
        ends, total = x.tolist(), sizes.get(axis)
        if total is None or (ends[0] == 0 and ends[-1] == total and all(a <= b for a, b in pairwise(ends))):
            return None
        shown = str(ends) if len(ends) <= 16 else f"[{', '.join(map(str, ends[:6]))}, ..., {', '.join(map(str, ends[-6:]))}]"
        rule = f"offsets that begin at 0, never fall and end at {axis} = {total}"
        return Wrong(rule, shown, "It is the cumulative sum of the sequence lengths with a 0 in front.")

    return values


def cu_seqlens(axis: str, hint: str = "") -> Argument:
    """The argument ``cu_seqlens`` [N+1]: offsets along an axis of tokens. Without it, each batch row is a sequence."""
    return Argument("cu_seqlens", "N+1", INDICES, required=False, values=offsets(axis), otherwise=("N", "B"), hint=hint)


def one_row(complaints: Complaints, tensors: Mapping[str, Tensor | None], sizes: Sizes) -> None:
    """For ``Signature.rules``: packed sequences are concatenated along the token axis of one batch row."""
    if tensors.get("cu_seqlens") is not None and sizes.get("B", 1) != 1:
        complaints.add(ShapeError, "B", "1 with cu_seqlens", sizes["B"], "Pack all sequences along the token axis.")


def ranges(ends: Tensor) -> list[tuple[int, int]]:
    """Begin and end of each packed sequence, on the host. Waits for the device."""
    return list(pairwise(ends.tolist()))
