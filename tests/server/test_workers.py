"""Threads beside the event loop and the engine."""

import os
import subprocess
import sys

from typer.testing import CliRunner

from penstock.cli import main
from penstock.server import workers

CODE = """
import threading, time
from penstock.server import workers
{call}
stop = False
def work():
    while not stop:
        [{{"a": n}} for n in range(100)]
def operations():
    began = time.perf_counter()
    for _ in range(100):
        time.sleep(0)  # gives up Python's lock, as each operation of a step does
    return time.perf_counter() - began
thread = threading.Thread(target=work)
thread.start()
found = sorted(operations() for _ in range(8))
print(found[0], found[-1])
stop = True
thread.join()
"""


def seconds(call):
    """The least and the most that a hundred operations take beside a thread that works in Python."""
    words = [sys.executable, "-c", CODE.format(call=call)]
    least, most = subprocess.run(words, env=dict(os.environ), capture_output=True, text=True, check=True).stdout.split()
    return float(least), float(most)


def test_operations_wait_little_for_a_thread_that_works_in_python():
    assert seconds("workers.take_short_turns()")[0] < seconds("")[1] / 3


def test_the_command_takes_short_turns(monkeypatch, tmp_path):
    def called():
        raise ZeroDivisionError

    monkeypatch.setattr(workers, "take_short_turns", called)
    assert isinstance(CliRunner().invoke(main, ["serve", "--model", str(tmp_path), "--port", "0"]).exception, ZeroDivisionError)
