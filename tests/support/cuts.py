"""Calls whose tokens change behind a cut: what a call is followed by, and its tensors then."""

from collections.abc import Callable

import deltas
import torch
from attention import Attention
from cases import Case
from contract import Tensors
from torch import Tensor

Change = Callable[[str, Tensor], Tensor]


def scaled(factor: float, names: str = "qkv") -> Change:
    return lambda name, x: x * factor if name in names else x


def decayed(least: float, most: float) -> Change:
    """Log decays, and raw gates of the opposite sign."""
    signs = {"g": 1, "raw": -1}

    def change(name: str, x: Tensor) -> Tensor:
        return signs[name] * torch.linspace(least, most, x.numel(), device=x.device).view(x.shape) if name in signs else x

    return change


FORGOTTEN = {"g": -torch.inf, "raw": torch.inf}
AFTER: dict[str, Change] = {
    "1000 times as large": scaled(1000.0),
    "1000 times as small": scaled(1e-3),
    "zeros": scaled(0.0),
    "values 1000 times as large": scaled(1000.0, "v"),
    "strong decays": decayed(-20.0, -100.0),
    "weak decays": decayed(-1e-6, -1e-3),
    "all forgotten": lambda name, x: torch.full_like(x, FORGOTTEN[name]) if name in FORGOTTEN else x.flip(-1) * 300.0,
    "another sequence": lambda name, x: x,
    "NaN": lambda name, x: x if name == "g" else torch.full_like(x, torch.nan),
}
"""What follows a cut, by argument."""
CUTS = (5, 37, 64, 83)
"""Within 16 tokens, a half and a chunk, and between chunks."""
OVERFLOWING = {"1000 times as large", "all forgotten"}
"""In the delta rule, keys so large that a state has no bound, and the inverse of a chunk overflows: as a NaN, see docs/delta.md."""
SERIAL = ("reference", "cpu", "cuda", "triton_recurrent")
"""Implementations of the recurrence in which a NaN never reaches earlier tokens, see docs/recurrence.md."""


Used = Case | Attention


def changed(case: Used, tensors: Tensors, cut: int, after: str) -> Tensors:
    """The tensors of a case with something else behind a cut."""
    found = dict(tensors)
    for one in case.operator.signatures[case.function].arguments:
        x = tensors.get(one.name)
        if x is not None and one.axes.split()[1:2] in (["T"], ["Tq"], ["Tk"]):
            found[one.name] = torch.cat((x[:, :cut], AFTER[after](one.name, x[:, cut:]).to(x.dtype)), 1)
    if after == "another sequence":
        found["cu_seqlens"] = tensors["cu_seqlens"].clone()
        found["cu_seqlens"][1] = cut
    return found


def followed(case: Used, impl: str) -> list[str]:
    """What a call is followed by: packed sequences by more of the next sequence, others by other values."""
    if case.lengths is not None:
        return ["another sequence"]
    recurrence = isinstance(case, Case)
    left_out = {"another sequence"} if recurrence and impl in SERIAL else {"another sequence", "NaN"}
    if not recurrence or "T" not in case.row.decay:
        left_out |= {"strong decays", "weak decays"}
    if isinstance(case, deltas.Delta) and impl == "triton_chunkwise":
        left_out |= OVERFLOWING
    return [after for after in AFTER if after not in left_out]
