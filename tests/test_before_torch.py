"""What the commands set before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import every

import penstock
from penstock.before_torch import is_command, wait_passively

ROOT = Path(penstock.__file__).parents[1]
WAYS = {
    "module": ["-m", "penstock"],
    "module in one word": ["-mpenstock"],
    "script": ["SCRIPT"],
    "module of the package": ["-m", "penstock.training.lm_eval"],
}
"""Ways to start a command."""


def spin_count(words, **environment):
    """The spin count of GNU's OpenMP runtime, which it prints when torch loads it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    clean |= {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, *words, "--version"], env=clean, capture_output=True, text=True, timeout=120)
    found = [line.partition("=")[2].strip(" '") for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not found:
        pytest.skip("torch's OpenMP runtime is not GNU's")
    return int(found[0])


@pytest.mark.parametrize("way", every(4, WAYS))
def test_threads_of_commands_do_not_spin(way, tmp_path):
    (tmp_path / "penstock").write_text("from penstock.cli import main\nmain()\n")
    words = [str(tmp_path / "penstock") if word == "SCRIPT" else word for word in WAYS[way]]
    assert spin_count(words) == 0


def test_programs_that_import_the_package_keep_their_settings():
    assert spin_count(["-c", "import penstock"]) > 0


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "1234"), ("OMP_WAIT_POLICY", "ACTIVE")])
def test_settings_of_the_user_stay(name, value):
    found = spin_count(WAYS["module"], **{name: value})
    assert found == 1234 if name == "GOMP_SPINCOUNT" else found > 0


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"])
def test_no_variable_of_the_user_is_joined_by_another(name):
    environment = {name: "0"}
    wait_passively(environment)
    assert environment == {name: "0"}


@pytest.mark.parametrize(
    ("argv", "original", "wanted"),
    [
        (["/usr/bin/penstock", "train"], ["python", "/usr/bin/penstock", "train"], True),
        (["-m", "serve", "-m", "x"], ["python", "-X", "dev", "-m", "penstock", "serve", "-m", "x"], True),
        (["-m", "-m", "penstock"], ["python", "-m", "pytest", "-m", "penstock"], False),
        (["-m"], ["python", "-m", "penstock_other"], False),
        (["my/program.py"], ["python", "my/program.py"], False),
        ([""], ["python"], False),
        ([], [], False),
    ],
)
def test_commands_are_told_from_programs(argv, original, wanted):
    assert is_command(argv, original) is wanted


def test_without_numpy_torch_says_nothing(tmp_path):
    """A package that cannot be imported stands for a missing one."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')\n")
    for words, silent in ((["-m", "penstock", "--version"], True), (["-c", "import penstock"], False)):
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert ("NumPy" not in done.stderr) is silent, done.stderr
