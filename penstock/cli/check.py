"""``penstock check``: what this machine has, and whether every implementation is right on it."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from ..bench.machine import Machine
from ..bench.report import print_findings, print_machine
from ..bench.verify import findings


def check(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON instead: each result, its error, what is allowed.")
    ] = False,
) -> None:
    """Hold every implementation on this machine to the float64 oracle.

    Shows the processor, the GPUs and the versions, then runs every implementation for every variant in float16, bfloat16,
    float32 and float64: output, final state, every gradient and the decode step. Allowed are 1e-12 for float64, 2e-6 for
    float32, and one rounding more for bfloat16 and float16 results.

    Exit code 0 if everything that runs here is right, 1 if anything is wrong.

    [bold]Examples[/bold]

      penstock check

      penstock check --json > check.json
    """
    if not print_check(Console(), as_json):
        raise typer.Exit(1)


def print_check(console: Console, as_json: bool = False) -> bool:
    """Check and print; return whether everything is right."""
    machine = Machine.here()
    if not as_json:
        print_machine(console, machine)
    waiting: AbstractContextManager[object] = nullcontext() if as_json else console.status("asking the oracle", spinner="dots")
    with waiting:
        found = list(findings())
    wrong = [finding for finding in found if finding.failed]
    if as_json:
        typer.echo(json.dumps({"ok": not wrong, "machine": asdict(machine), "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        console.print()
        print_findings(console, found)
        ran = sum(finding.error is not None for finding in found)
        verdict = f"[bold red]{len(wrong)} wrong[/] of {ran} results" if wrong else f"[bold green]right[/]: all {ran} results"
        console.print(f"\n{verdict}")
    return not wrong
