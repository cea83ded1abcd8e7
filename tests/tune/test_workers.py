"""Functions in worker processes: a failure, crash or timeout affects one job only."""

import os
import signal
from importlib import import_module
from time import sleep

from penstock.tune.workers import PRELOADED, Failure, one_by_one, side_by_side


def test_preloaded_modules_exist():
    """The fork server ignores missing modules, and every process would then import torch again."""
    for name in PRELOADED:
        import_module(name)


def half(x):
    if x == 0:
        raise ValueError("no half of nothing")
    if x < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return x / 2


def division_by(given):
    calls = [0]

    def divide(x):
        calls[0] += 1
        return half(x) / given, calls[0]

    return divide


def test_failures_and_crashes_do_not_affect_other_jobs():
    assert list(side_by_side(half, [4, 0, -1, 6], 60, workers=2)) == [
        2.0, Failure("ValueError: no half of nothing"), Failure("its process ended with exit code -9"), 3.0,
    ]  # fmt: skip
    assert list(side_by_side(half, [], 60)) == []
    zero = Failure("ZeroDivisionError: float division by zero")
    assert list(one_by_one(division_by, 2, [4, 8, -1, 0, 6, 10], 60)) == [
        (1.0, 1), (2.0, 2), Failure("its process ended with exit code -9"), Failure("ValueError: no half of nothing"), (1.5, 1), (2.5, 2),
    ]  # fmt: skip
    assert list(one_by_one(division_by, 0, [4, 6], 60)) == [zero, zero]


def test_timeouts_do_not_affect_other_jobs():
    assert list(side_by_side(sleep, [0], 60)) == [None]  # starts the fork server; later processes start fast
    assert list(side_by_side(sleep, [0, 60, 0], 2, workers=1)) == [None, Failure("not done after 2 s"), None]
