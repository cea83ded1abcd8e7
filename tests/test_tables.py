"""Tables at the widths of terminals: every number of a wide table is in the narrow one, and nothing is cut off."""

import re
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.bench.serving.load import Load, Run, Times
from penstock.bench.serving.report import print_runs
from penstock.cli import main
from penstock.tables import Numbers

RECORDS = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("*.json"))


def command(*words):
    """What prints by a command, at a width."""

    def printed(width, monkeypatch):
        monkeypatch.setenv("COLUMNS", str(width))
        done = CliRunner().invoke(main, list(words))
        assert done.exit_code == 0, done.output
        return done.output

    return printed


def function(print_to):
    """What prints by a function that takes a console."""

    def printed(width, monkeypatch):
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            print_to(console)
        return capture.get()

    return printed


def runs(console):
    times = [Times(0.0123 * n, 12.3456 * n) for n in (1, 2)]
    loads = Load(clients=4096), Load(rate=12345.6)
    print_runs(console, [Run(load, 123456, 7.0, 10**9, 10**8, 10**7, one, one, one) for load, one in zip(loads, times)])


def columns(console):
    table = Numbers("name", [f"column {n}" for n in range(30)], title="A title")
    for row in range(3):
        table.add(f"row {row}", *(f"{1000 * row + n} us" for n in range(30)))
    table.print(console)


PRINTED = {
    **{path.stem: command("bench", "--from", str(path)) for path in RECORDS},
    "bench --list": command("bench", "--list"),
    "bench-serve": function(runs),
    "many columns": function(columns),
}


def numbers(text):
    return Counter(re.findall(r"\d[\d.,e%x-]*", text))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", PRINTED)
def test_narrow_tables_have_every_number(name, width, monkeypatch):
    wide, narrow = (PRINTED[name](columns, monkeypatch) for columns in (1000, width))
    assert "…" not in narrow
    assert not numbers(wide) - numbers(narrow)
    assert all(len(line.rstrip()) <= width for line in narrow.splitlines() if "─" in line), "a table is wider than the terminal"
