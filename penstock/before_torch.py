"""Settings of the commands that torch reads when it is imported. ``penstock/__init__.py`` imports this module first.

OpenMP reads its environment when torch loads it. By default its threads spin for milliseconds while they wait for each other. Where
another process has one of the cores, a waiting thread takes the time that the thread it waits for needs: three steps of a training take
22 s on two busy cores, and 7 s with threads that sleep (``benchmarks/NOTES.md``). So the commands wait passively, unless the environment
says otherwise. A program that imports ``penstock`` keeps its own settings.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import MutableMapping
from pathlib import Path

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables that say how threads wait. With one of them in the environment, none is set."""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""GNU's runtime, which torch ships, then has a spin count of 0; Intel's, which may be loaded in its place, a block time of 0."""


def is_command(argv: list[str], original: list[str]) -> bool:
    """Whether ``sys.argv`` and ``sys.orig_argv`` are of the script ``penstock`` or of ``python -m penstock``, with or without a module.

    >>> is_command(["/usr/bin/penstock", "train"], [])
    True
    >>> is_command(["-m", "train"], ["python", "-m", "penstock", "train"])
    True
    """
    if not argv or argv[0] != "-m":  # which it is until the module is found
        return bool(argv) and Path(argv[0]).name == "penstock"
    module = original[len(original) - len(argv)].removeprefix("-m") if len(original) >= len(argv) else ""
    return module.partition(".")[0] == "penstock"


def wait_passively(environment: MutableMapping[str, str]) -> None:
    """Let waiting threads of OpenMP sleep, unless the environment says how they wait."""
    if not any(name in environment for name in WAITING):
        environment.update(PASSIVE)


if is_command(sys.argv, sys.orig_argv):
    wait_passively(os.environ)
    # torch works without NumPy, which it says at every start
    warnings.filterwarnings("ignore", "Failed to initialize NumPy: No module named 'numpy'", UserWarning)
