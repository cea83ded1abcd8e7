"""Installs the wheel of this machine into a fresh environment, without a compiler and without Triton, and uses it there.

    python -m release.try_wheel dist

Runs ``penstock doctor`` and all of ``penstock check``, generates text with a model that it saves first, and times ``import penstock``.
pip takes the dependencies from where it is configured to, in the versions of ``constraints.txt``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hatch_build import of_this_machine

from .wheels import ROOT, only

T = TypeVar("T")
MOST_SECONDS = 0.3
"""Processor time of ``import penstock`` beyond torch."""
IMPORT = """
import time, torch
start = time.process_time()
import penstock
print(time.process_time() - start)
"""
SAVE = """
import sys, torch
from penstock.models import CausalLM, rwkv6, save
torch.manual_seed(0)
model = CausalLM(rwkv6(vocab_size=256, hidden_size=64, num_layers=2, head_size=32))
save(model, sys.argv[1], format="blinkdl")
"""


class Environment:
    """A fresh one, in a folder: commands run there see its programs only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "environment" / ("Scripts" if os.name == "nt" else "bin")
        subprocess.run([sys.executable, "-m", "venv", str(folder / "environment")], check=True)

    def run(self, program: str, *words: str) -> str:
        """The standard output. Raises SystemExit with the errors."""
        hidden = ("CC", "CXX", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        variables = {name: value for name, value in os.environ.items() if name not in hidden} | {"PATH": str(self.programs)}
        command = [str(self.programs / program), *words]
        done = subprocess.run(command, env=variables, cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"try_wheel: {program} {words[0]} must end with 0, got {done.returncode}.\n{done.stdout}\n{done.stderr}")
        return done.stdout


def timed(what: str, work: Callable[[], T]) -> T:
    """Prints the seconds of a step, and those of processors, which other programs do not change."""
    start, before = time.perf_counter(), os.times()
    result = work()
    after = os.times()
    processors = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"{what}: {time.perf_counter() - start:.1f} s, {processors:.1f} s of processors", flush=True)
    return result


def main(folder: str) -> None:
    """The exit status is 1 if a step fails."""
    wheel = only("try_wheel", folder, f"*-{of_this_machine()}.whl")
    with tempfile.TemporaryDirectory() as place:
        here = Environment(Path(place))
        install = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel))
        timed(f"install {wheel.name}", lambda: here.run("python", *install))
        here.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "triton")  # comes with torch's wheels for CUDA
        seconds = min(float(here.run("python", "-W", "ignore", "-c", IMPORT)) for _ in range(5))
        print(f"import penstock beyond torch: {seconds:.3f} s of processor time", flush=True)
        found = json.loads(timed("penstock doctor", lambda: here.run("penstock", "doctor", "--json")))
        if (found["compiler"], found["machine"]["triton"]) != (None, None):
            raise SystemExit(f"try_wheel: a compiler and Triton must be absent, got {found['compiler']}, {found['machine']['triton']}.")
        forward = {family["forward"] for family in found["taken"] if family["family"] in ("recurrence", "delta")}
        if forward != {"cpu"}:
            raise SystemExit(f"try_wheel: the native library must be taken, got {forward}.")
        checked = json.loads(timed("penstock check", lambda: here.run("penstock", "check", "--json")))
        print(f"  {sum(one['error'] is not None for one in checked['findings'])} results are right")
        model = str(here.folder / "bytes.pth")
        here.run("python", "-c", SAVE, model)
        words = ("generate", "--model", model, "--prompt", "abc", "--max-tokens", "8", "--seed", "0")
        print(f"  {timed('penstock generate', lambda: here.run('penstock', *words))!r}")
        if seconds > MOST_SECONDS:
            raise SystemExit(f"try_wheel: import penstock must take at most {MOST_SECONDS} s, got {seconds:.3f}.")


if __name__ == "__main__":
    main(*sys.argv[1:])
