"""transformers' argument ``logits_to_keep``: which tokens get logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import Complaints, DtypeError, RangeError, ShapeError, described


def check_columns(function: str, which: object, B: int, T: int) -> None:
    """Check ``logits_to_keep``, which columns only where that does not wait for a device."""
    name = "logits_to_keep"
    complaints = Complaints(function)
    if isinstance(which, Tensor):
        if which.dtype not in (torch.int64, torch.int32, torch.bool):
            complaints.add(DtypeError, name, "int64, int32 or bool", which.dtype)
        shapes = [[T], [B, T]] if which.dtype == torch.bool else [[which.numel()], [B, *which.shape[1:2]]]
        if list(which.shape) not in shapes:
            rule = f"of shape [{T}] or [{B}, {T}]" if which.dtype == torch.bool else f"of shape [n] or [{B}, n]"
            complaints.add(ShapeError, name, rule, list(which.shape))
        elif which.dtype != torch.bool and which.device.type == "cpu" and which.numel():
            least, most = (int(x) for x in which.aminmax())
            if least < -T or most >= T:
                complaints.add(RangeError, name, f"from {-T} to {T - 1}", least if least < -T else most)
    elif not isinstance(which, int) or isinstance(which, bool):
        complaints.add(DtypeError, name, "an int or a torch.Tensor", described(which))
    elif which < 0:
        complaints.add(RangeError, name, "at least 0", which, "0 keeps all.")
    complaints.raise_any()


def columns(x: Tensor, keep: Tensor | None, which: int | Tensor) -> Tensor:
    """Some columns of x [B,T,C], those of ``logits_to_keep``; or, packed [1,S,C], of the tokens that ``keep`` [B,T] has.

    A column of padding is that of the last token before it, or 0.
    """
    if keep is None:
        return chosen(x, which)
    seen = keep.cumsum(1)
    before = F.pad(keep.sum(1).cumsum(0), (1, 0))[:-1, None]
    places = chosen(before + seen - 1, which)
    return x[0][places.clamp(min=0)].where(chosen(seen, which)[..., None] > 0, 0.0)


def chosen(x: Tensor, which: int | Tensor) -> Tensor:
    """``x[:, which]`` of x [B,T,...]; an int: so many at the end, 0: all."""
    if isinstance(which, int):
        return x[:, -which:] if which else x
    if which.dim() == 1:
        return x[:, which]
    return x[which] if which.dtype == torch.bool else x[torch.arange(len(x), device=x.device)[:, None], which]
