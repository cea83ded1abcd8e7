"""Resident memory of a server."""

from __future__ import annotations

import ctypes
import os
import platform

M_MMAP_THRESHOLD = -3
THRESHOLD = 2**17
"""Bytes from which each allocation is a mapping of its own, which goes back to the system when it is freed. glibc begins with this one."""
SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Who sets one of these has chosen otherwise."""


def keep_flat() -> bool:
    """Let glibc give large blocks of freed memory back to the system, in this process; whether it does.

    A step of the model has temporaries of megabytes, among them rows of logits. glibc maps the first block of a size by itself. When it is
    freed, glibc raises its threshold to that size, up to 32 MiB, and takes later blocks from the arenas of threads. What lives longer
    fragments these, so they grow without an end. A fixed threshold ends that. One arena for all threads, without it, does not.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in SETTINGS):
        return False
    return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, THRESHOLD))
