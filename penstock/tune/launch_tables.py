"""Which launch tables are in use here, for people."""

from __future__ import annotations

import torch

from ..gpu.target import Target
from ..recurrence.triton.table_file import read, shipped, user_path


def table_lines() -> list[tuple[str, str]]:
    """Architecture and what is in use for it, for each kind of GPU here."""
    archs = dict.fromkeys(Target.of(torch.device("cuda", index)).arch for index in range(torch.cuda.device_count()))
    return [(arch, told(arch)) for arch in archs]


def told(arch: str) -> str:
    """Where the block sizes for this architecture come from, in the order in which they are looked for."""
    own, measured, path = read(user_path(arch), arch), shipped(arch), user_path(arch)
    first = f"{len(own)} entries of {path}" if own else f"no entries of yours ({path})"
    return f"{first}, then {len(measured)} shipped, then by rule"
