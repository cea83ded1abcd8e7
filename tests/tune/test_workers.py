"""Functions in processes of their own: one that fails, crashes or hangs does so alone."""

import os
import signal
from importlib import import_module
from time import sleep

from penstock.tune.workers import PRELOADED, Failure, one_by_one, side_by_side


def test_preloaded_modules_exist():
    """A forkserver ignores those that do not, and every process then imports torch again."""
    for name in PRELOADED:
        import_module(name)


def half(x):
    if x == 0:
        raise ValueError("no half of nothing")
    if x < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return x / 2


def over(given):
    begun = [0]

    def share(x):
        begun[0] += 1
        return half(x) / given, begun[0]

    return share


def test_failures_and_crashes_do_not_affect_other_jobs():
    assert list(side_by_side(half, [4, 0, -1, 6], 60, workers=2)) == [
        2.0, Failure("ValueError: no half of nothing"), Failure("its process ended with exit code -9"), 3.0,
    ]  # fmt: skip
    assert list(side_by_side(half, [], 60)) == []
    nothing = Failure("ZeroDivisionError: float division by zero")
    assert list(one_by_one(over, 2, [4, 8, -1, 0, 6, 10], 60)) == [
        (1.0, 1), (2.0, 2), Failure("its process ended with exit code -9"), Failure("ValueError: no half of nothing"), (1.5, 1), (2.5, 2),
    ]  # fmt: skip
    assert list(one_by_one(over, 0, [4, 6], 60)) == [nothing, nothing]


def test_timeouts_do_not_affect_other_jobs():
    assert list(side_by_side(sleep, [0], 60)) == [None]  # processes are quick to start from now on
    assert list(side_by_side(sleep, [0, 60, 0], 5, workers=1)) == [None, Failure("not done after 5 s"), None]
