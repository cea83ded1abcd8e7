"""torch.autocast: which dtype a call runs in, and none inside of implementations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocasting(kind: str) -> bool:
    """Whether autocast is on for devices of this kind."""
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


_NOTHING = nullcontext()


def no_autocast(x: Tensor | None) -> AbstractContextManager[object]:
    """Implementations choose their own precision."""
    kind = "" if x is None else x.device.type
    return torch.autocast(kind, enabled=False) if autocasting(kind) else _NOTHING
