"""Sizes that the CUDA kernels take."""

from __future__ import annotations

HEADS = (32, 64, 128)
"""Supported head sizes, K = V."""
COLUMNS = 16
"""Columns of the state per thread block, as in tokens.cuh."""
FAR = 1 << 31
"""Token indices and token offsets are 32-bit integers."""
