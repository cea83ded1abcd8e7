"""A summary of the launch tables in use on this machine."""

from __future__ import annotations

import torch

from ..call.families import families
from ..gpu.target import Target


def table_lines() -> list[tuple[str, str]]:
    """Each GPU architecture of this machine, and a summary of the tables of each family that has some."""
    archs = dict.fromkeys(Target.of(torch.device("cuda", index)).arch for index in range(torch.cuda.device_count()))
    return [(arch, one.tables(arch)) for arch in archs for one in families() if one.tables is not None]
