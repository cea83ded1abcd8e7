"""``penstock check``: compare every implementation with the oracle on this machine, or compile the kernels for GPUs."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..bench.report import print_findings, print_machine
from ..errors import Complaints, RangeError, shortened
from ..tune.launch_tables import table_lines
from ..verify.machine import Machine, using_threads
from ..verify.verify import findings
from .options import Threads
from .outputs import check_outputs


def check(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: each result, its error and the allowed error.")] = False,
    compile_ahead: Annotated[
        bool, typer.Option("--compile", help="Compile the Triton kernels for GPUs, present or absent, and run nothing.")
    ] = False,
    arch: Annotated[list[str] | None, typer.Option(help="With --compile: only for this GPU. Repeatable.", show_default="all")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="With --compile: only launches whose name contains this. Repeatable.", show_default="all"),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --compile: write registers, spills and shared memory to this file instead of comparing."),
    ] = None,
    threads: Threads = None,
) -> None:
    """Compare every implementation on this machine with the float64 oracle.

    Shows the processor, the GPUs and the versions, then runs every implementation for every variant in float16, bfloat16,
    float32 and float64: output, final state, every gradient and the decode step. Then every form of an implementation (a
    kernel, or a fixed group of kernels) for which this GPU has code runs on examples of its own; one that does not run is a
    failure. The allowed error is 1e-12 for float64, 2e-6 for float32, and one rounding more for bfloat16 and float16 results.

    With --compile, every kind of launch of the models is compiled for an A100 (sm_80), an H100 or H200 (sm_90), a B200
    (sm_100) and an MI300X (gfx942), and a part of them for an RTX 3090 or A10 (sm_86), an RTX 4090, L4 or L40S (sm_89) and
    an RTX 5090 (sm_120), which takes minutes. Each must compile and fit the GPU's shared memory. With the Triton version of
    the record in this package, each must also spill no more bytes than recorded, and at most 128 a thread unless the record
    waives that and says why.

    Exit code 0 if everything that runs here is right, 1 if anything is wrong.

    [bold]Examples[/bold]

      penstock check

      penstock check --json > check.json

      penstock check --compile --arch sm_90 --only rwkv6
    """
    if not compile_ahead:
        complaints = Complaints("check")
        for name, given in (("arch", arch), ("only", only), ("record", None if record is None else str(record))):
            if given:
                complaints.add(RangeError, name, "left out without --compile", shortened(given), "Add --compile.")
        complaints.raise_any()
    check_outputs("check", {"--record": record})
    context.with_resource(using_threads(threads))
    right = print_compiled(Console(), arch or [], only or [], record, as_json) if compile_ahead else print_check(Console(), as_json)
    if not right:
        raise typer.Exit(1)


def print_compiled(console: Console, archs: list[str], only: list[str], record: Path | None, as_json: bool = False) -> bool:
    """Compile ahead of time and print; return whether everything is right."""
    from ..tune.ahead import check_compiler

    check_compiler("check")
    from ..tune import resources  # needs Triton

    launches = resources.chosen(archs, only)
    triton = version("triton")
    status: AbstractContextManager[object] = nullcontext() if as_json else console.status("compiling", spinner="line")
    with status:
        compiled = resources.compiled(launches)
    recorded = None if record is not None else resources.RecordedResources.read()
    found = resources.compared(recorded, triton, compiled)
    wrong = [finding for finding in found if finding.wrong]
    if record is not None and not wrong:
        resources.RecordedResources.of(triton, found, resources.RecordedResources.read().waivers).write(record)
    if as_json:
        content = {"ok": not wrong, "triton": triton, "recorded_with": recorded and recorded.triton}
        typer.echo(json.dumps(content | {"launches": [finding.as_json() for finding in found]}, indent=2))
        return not wrong
    resources.print_findings(console, found)
    if record is not None:
        note = f"written: {record}" if not wrong else "not written"
    elif recorded is not None and recorded.triton == triton:
        note = f"no spills beyond the record of Triton {triton}" if not wrong else f"compared with the record of Triton {triton}"
    else:
        note = f"spills not compared: this is Triton {triton}, the record is of {recorded and recorded.triton}"
    verdict = f"[bold red]{len(wrong)} wrong[/] of {len(found)} launches" if wrong else f"[bold green]right[/]: all {len(found)} launches"
    console.print(f"{verdict}; {note}", soft_wrap=True, highlight=False)
    return not wrong


def print_check(console: Console, as_json: bool = False) -> bool:
    """Check and print; return whether everything is right."""
    machine = Machine.here()
    if not as_json:
        print_machine(console, machine, table_lines())
    status: AbstractContextManager[object] = nullcontext() if as_json else console.status("checking", spinner="line")
    with status:
        found = list(findings())
    wrong = [finding for finding in found if finding.failed]
    if as_json:
        typer.echo(json.dumps({"ok": not wrong, "machine": asdict(machine), "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        print_findings(console, found)
        ran = sum(finding.error is not None for finding in found)
        verdict = f"[bold red]{len(wrong)} wrong[/] of {ran} results" if wrong else f"[bold green]right[/]: all {ran} results"
        console.print(f"\n{verdict}")
    return not wrong
