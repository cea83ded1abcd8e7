"""A summary of the launch tables in use on this machine."""

from __future__ import annotations

import torch

from ..gpu.target import Target
from ..recurrence.triton.table_file import read, shipped, user_path


def table_lines() -> list[tuple[str, str]]:
    """Each GPU architecture of this machine and a summary of its tables."""
    archs = dict.fromkeys(Target.of(torch.device("cuda", index)).arch for index in range(torch.cuda.device_count()))
    return [(arch, summary(arch)) for arch in archs]


def summary(arch: str) -> str:
    """The sources of block sizes for an architecture, in the order of precedence."""
    own, measured, path = read(user_path(arch), arch), shipped(arch), user_path(arch)
    first = f"{len(own)} entries of {path}" if own else f"no entries of yours ({path})"
    return f"{first}, then {len(measured)} shipped, then by rule"
