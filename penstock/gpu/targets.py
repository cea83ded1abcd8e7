"""The GPUs for which kernels are compiled ahead of time."""

from __future__ import annotations

from .target import Target

TARGETS = {
    "sm_80": Target("sm_80", 108, 163 << 10),  # A100
    "sm_86": Target("sm_86", 82, 99 << 10),  # RTX 3090, A10
    "sm_89": Target("sm_89", 128, 99 << 10),  # RTX 4090, L4, L40S
    "sm_90": Target("sm_90", 132, 227 << 10),  # H100, H200
    "sm_100": Target("sm_100", 148, 227 << 10),  # B200
    "sm_120": Target("sm_120", 170, 99 << 10),  # RTX 5090
    "gfx942": Target("gfx942", 304, 64 << 10),  # MI300X
}
"""Multiprocessors and shared memory per program, by architecture. Of GPUs with several models, those of the first."""
SMALL = ("sm_86", "sm_89", "sm_120")
"""GPUs with 99 KiB of shared memory. They have the products of sm_80, and block sizes by rule, limited by the same memory. So a part of a
family's calls covers all their code."""
