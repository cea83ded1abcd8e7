"""Sizes of heads for which kernels are written. Kernels assert them when they are compiled, and their forms refuse others."""

from __future__ import annotations

from triton.language import constexpr

SMALL, MEDIUM, LARGE = constexpr(64), constexpr(128), constexpr(256)
"""Key channels of a program of the kernels for Hopper. Which of them, each kernel says."""
GROUPED = constexpr(128)
"""Key channels of a head that shares q and k, at most: gradients of q and k of all of them are in registers."""
