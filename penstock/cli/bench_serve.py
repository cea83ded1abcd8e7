"""``penstock bench-serve``: load on a server."""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from ..bench.figure import check_plot
from ..bench.serving.client import KEY_VARIABLE, Target
from ..bench.serving.load import Load, Run, run
from ..bench.serving.report import Report, plot_runs, print_runs
from ..bench.serving.workload import LONGEST, Lengths, Workload
from ..errors import Complaints, RangeError
from .options import check_seed, wide_console
from .outputs import check_outputs

FUNCTION = "bench-serve"
MAX_CLIENTS = 4096


def bench_serve(
    url: Annotated[str, typer.Option(metavar="URL", help="The server, of OpenAI's API.")] = "http://127.0.0.1:8000",
    clients: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Clients that each wait for their answer. Repeatable.", show_default="1, 8 and 32, without --rate"),
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(metavar="R", help="Requests a second, whether answers come or not. Repeatable.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests of each run.", show_default="64, or 2 for each client")] = None,
    prompt: Annotated[str, typer.Option(metavar="LENGTHS", help="Tokens of prompts: 100, 50-150 (uniform) or exp:100.")] = "256",
    output: Annotated[str, typer.Option(metavar="LENGTHS", help="Tokens of completions, likewise.")] = "64",
    prefix: Annotated[int, typer.Option(help="Tokens before each prompt that it shares with others.", min=0, max=LONGEST)] = 0,
    prefixes: Annotated[int, typer.Option(help="Number of different shared prefixes.", min=1, max=10000)] = 1,
    seed: Annotated[
        int | None, typer.Option(help="Seed of prompts and arrivals. Equal ones meet the server's cache. Default: another each time.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help=f"Key of the server. Default: {KEY_VARIABLE} of the environment.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for a request.", min=1)] = 600,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a picture to this png, pdf or svg file.")] = None,
) -> None:
    """Measure a server with OpenAI's API under load: throughput, time to the first token, time between tokens, hits of its cache.

    Each number of clients and each rate is a run of its own. Prompts are random tokens, and completions are streamed. The server must
    support ignore_eos, as penstock serve and others do, so that completions have the requested length.

    [bold]Examples[/bold]

      penstock bench-serve --clients 1 --clients 32 --clients 128

      penstock bench-serve --rate 2 --rate 8 --prompt exp:800 --output 50-250 --json load.json --plot load.png

      penstock bench-serve --clients 16 --prefix 2048 --prefixes 4 --prompt 100
    """
    check_outputs(FUNCTION, {"--json": json_file, "--plot": plot_file})
    if plot_file is not None:
        check_plot(plot_file)
    clients = clients or ([] if rate else [1, 8, 32])
    complaints = Complaints(FUNCTION)
    for count in clients:
        if not 1 <= count <= MAX_CLIENTS:
            complaints.add(RangeError, "clients", f"from 1 to {MAX_CLIENTS}", count)
    for one in rate or []:
        if not 0 < one <= 1e5:
            complaints.add(RangeError, "rate", "above 0 and at most 100000", one)
    if requests is not None and requests < 1:
        complaints.add(RangeError, "requests", "at least 1", requests)
    if seed is not None:
        check_seed(complaints, seed)
    complaints.raise_any()
    workload = Workload(Lengths.parse(FUNCTION, "prompt", prompt), Lengths.parse(FUNCTION, "output", output), prefix, prefixes)
    target = Target(url, api_key or os.environ.get(KEY_VARIABLE), timeout)
    loads = [*(Load(clients=count) for count in clients), *(Load(rate=one) for one in rate or [])]
    console = wide_console()
    runs = asyncio.run(
        _measured(console, target, workload, loads, requests, random.SystemRandom().getrandbits(32) if seed is None else seed)
    )
    report = Report(shlex.join(["penstock", *sys.argv[1:]]), url, target.model, workload, tuple(runs))
    print_runs(console, runs)
    if json_file is not None:
        report.write(json_file)
        console.print(f"numbers: {json_file}", highlight=False, soft_wrap=True)
    if plot_file is not None:
        plot_runs(report, plot_file)
        console.print(f"picture: {plot_file}", highlight=False, soft_wrap=True)
    if any(one.failed for one in runs):
        raise typer.Exit(1)


async def _measured(
    console: Console, target: Target, workload: Workload, loads: list[Load], requests: int | None, seed: int
) -> list[Run]:  # fmt: skip
    """One run for each load, after one request that is not counted."""
    await target.find_model()
    runs = []
    with Progress(console=console, transient=True) as progress:
        for n, load in enumerate(loads):
            rng = random.Random(f"{seed} {n}")
            jobs = workload.draw(requests or max(64, 2 * (load.clients or 0)), rng)
            if n == 0:
                await target.complete(workload.draw(1, random.Random(f"{seed} first"))[0])
            bar = progress.add_task(str(load), total=len(jobs))
            runs.append(await run(target, jobs, load, rng, lambda bar=bar: progress.advance(bar)))  # type: ignore[misc]
    return runs
