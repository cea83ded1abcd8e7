"""Pools of states [P,H,K,V]: sequence n starts from row ``slots[n]``, which is updated in place."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..call.declaration import INDICES, Argument, Sizes, Wrong
from ..errors import Complaints, ShapeError

STEP_TOKENS = 16
"""The most tokens per sequence of a decode step."""


def rows(slots: Tensor, sizes: Sizes) -> Wrong | None:
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
