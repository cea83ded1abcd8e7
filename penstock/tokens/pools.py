"""Pools of states [P,H,K,V]: sequence n starts from row ``slots[n]``, which is updated in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..call.declaration import INDICES, Argument, Options, Signature, Sizes, Wrong
from ..errors import Complaints, ShapeError

STEP_TOKENS = 16
"""The most tokens per sequence of a decode step."""


def rows(slots: Tensor, sizes: Sizes, options: Options) -> Wrong | None:
    """The rule for values of slots."""
    taken, count = [slot for slot in slots.tolist() if slot >= 0], sizes.get("P")
    if count is not None and any(slot >= count for slot in taken):
        return Wrong(f"below the {count} rows of state", str(max(taken)), "A negative slot skips a sequence.")
    if len(set(taken)) < len(taken):
        twice = sorted({slot for slot in taken if taken.count(slot) > 1})
        return Wrong("different for every sequence", f"{twice} more than once", "Two sequences cannot share a state.")
    return None


def own_row(complaints: Complaints, tensors: Mapping[str, Tensor | None], sizes: Sizes) -> None:
    """For ``Signature.rules``: without slots, sequence n is row n of a pool of N rows."""
    state = tensors.get("state")
    if tensors.get("slots", state) is None and state is not None and "N" in sizes and sizes["P"] != sizes["N"]:
        rule = f"of shape [N,H,K,V] = [{', '.join(str(sizes.get(axis, '*')) for axis in 'NHKV')}]"
        complaints.add(ShapeError, "state", rule, list(state.shape), "Pass slots= to address rows of a larger pool.")


SLOTS = Argument("slots", "N", INDICES, required=False, values=rows)
POOL = Argument("state", "P H K V", written=True, hint="A state has the heads of v.")


def one_token(signature: Signature, tensors: Sequence[Tensor | None]) -> tuple[bool, list[Tensor | None]]:
    """Whether q of a decode step has no axis of tokens, and its tensors (the first arguments of the signature) with one.

    Raises if a sequence has more than ``STEP_TOKENS`` tokens, or if another tensor has the axis and q has not.
    """
    q, found, timed = tensors[0], list(tensors), []
    if not isinstance(q, Tensor) or q.dim() != 3:
        if isinstance(q, Tensor) and q.dim() == 4 and not q.is_nested and q.shape[1] > STEP_TOKENS:
            complaints = Complaints(signature.function)
            complaints.add(ShapeError, "T", f"at most {STEP_TOKENS} tokens a sequence", q.shape[1], "Use advance() for more.")
            complaints.raise_any()
        return False, found
    for place, (x, (name, axes)) in enumerate(zip(tensors, signature.axes.items())):
        if isinstance(x, Tensor) and "T" in axes and not x.is_nested:
            if x.dim() == len(axes) - 1:
                found[place] = x.unsqueeze(1)
            elif x.dim() == len(axes) and (len(axes) == 4 or x.shape[1] == 1):  # three axes could be those of a decay per channel
                timed.append((name, list(x.shape)))
    if timed:
        complaints = Complaints(signature.function)
        for name, shape in timed:
            complaints.add(ShapeError, name, "without the axis T, as q", shape, f"Pass {name}[:, 0], or all inputs with the axis.")
        complaints.raise_any()
    return True, found
