"""``penstock demo``: checks, times and a short training run."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..bench.candidates import loop, ours
from ..bench.cases import MODELS
from ..bench.measure import Measurement, measure
from ..bench.plot import plot_losses, plot_measurements
from ..bench.record import Record
from ..bench.report import duration
from ..demo.serve import ask
from ..demo.text import python_topics
from ..demo.train import DEFAULT, PROMPT, check_architecture, train, weights_name
from ..errors import Complaints, MissingExtra
from ..tokens.shape import Shape
from ..verify.inputs import inputs
from ..verify.machine import Machine
from .check import print_check
from .options import Threads, check_seconds, use_cores
from .outputs import Folder, check_outputs

MODEL_ROWS = tuple({case.variant: case for case in reversed(MODELS)}.values())[::-1]
"""One model for each variant."""
SWEEP = (64, 128, 256, 512, 1024, 2048, 4096)
SWEEP_SECONDS = 25.0
"""Time for all lengths of the picture. The token loop is left out of lengths that would not fit."""
QUICK = Shape(1, 32, 2, 16, 16)
NUMBERS, PICTURE, CURVE = "numbers.json", "speed.png", "training.png"


def demo(
    context: typer.Context,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the picture, the numbers and the trained model.")] = Path(
        "penstock-demo"
    ),
    seconds: Annotated[float, typer.Option(help="Training time in seconds.")] = 60.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use tiny shapes and one second of training, to test that everything runs.")
    ] = False,
    model: Annotated[str, typer.Option(help="The architecture that is trained: rwkv6 or rwkv7.")] = DEFAULT,
    threads: Threads = None,
) -> None:
    """Run checks, compare speed with the token loop, train a model from scratch and serve it for a moment, in about three minutes.

    Writes all numbers, pictures of time against length and of the training losses, and the model's weights.

    [bold]Examples[/bold]

      penstock demo

      penstock demo --folder /tmp/demo --seconds 30

      penstock demo --model rwkv7
    """
    complaints = Complaints("demo")
    check_seconds(complaints, seconds)
    complaints.raise_any()
    check_architecture("demo", model)
    weights = weights_name(model)
    check_outputs("demo", {}, Folder("--folder", folder, (NUMBERS, PICTURE, CURVE, weights)))
    python_topics()  # raises before any work if the training text is missing
    console, machine = Console(), use_cores(context, threads)
    console.rule("1. Correctness on this machine", align="left")
    if not print_check(console):
        raise typer.Exit(1)
    console.print()
    console.rule("2. Speed", align="left")
    written = _speed(console, folder, quick, machine)
    console.print()
    console.rule("3. Training", align="left")
    written += _train(console, folder, 1.0 if quick else seconds, machine, model)
    console.print()
    console.rule("4. Serving", align="left")
    _serve(console, folder / weights)
    console.print()
    console.rule("Files", align="left")
    width = max(len(str(path)) for path, _ in written)
    for path, content in written:
        console.print(f"  {path!s:<{width}}  {content}", markup=False, highlight=False, soft_wrap=True)
    console.print("\nNext commands")
    serve = f"penstock serve --model {folder / weights}"
    generate = f'penstock generate --model {folder / weights} --prompt "The "'
    for command in (generate, serve, "penstock bench --list", "penstock bench rwkv6 --mode fwdbwd", "penstock bench --help"):
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)


def _serve(console: Console, weights: Path) -> None:
    """Answer one HTTP request with the trained model."""
    with console.status("starting penstock serve", spinner="line"):
        try:
            answer = ask(weights, PROMPT.decode())
        except MissingExtra as missing:
            console.print(f"Not served: {missing}", markup=False)
            return
    console.print(f"POST {answer.url}/v1/completions: {answer.prompt_tokens} tokens in, {answer.completion_tokens} out\n", markup=False)
    console.print(PROMPT.decode() + answer.text, markup=False, highlight=False)


def _speed(console: Console, folder: Path, quick: bool, machine: Machine) -> list[tuple[Path, str]]:
    with console.status("measuring", spinner="line") as status:
        models = []
        for case in MODEL_ROWS:
            status.update(f"{case.variant}: {case.model}")
            models.append(_measured(case.name, case.variant, QUICK if quick else case.shape, 0.02 if quick else 0.4))
        print_models(console, models)
        status.update("rwkv6 at several lengths")
        lengths = _sweep(QUICK if quick else MODEL_ROWS[-1].shape, SWEEP[:2] if quick else SWEEP, 0.02 if quick else 0.25)
    record = Record.of("penstock demo", "cpu", models + lengths, machine)
    numbers, picture = folder / NUMBERS, folder / PICTURE
    record.write(numbers)
    written = [(numbers, "the numbers of parts 2 and 3, and the machine")]
    try:
        plot_measurements(lengths, picture, record.place)
        written.append((picture, "time against length, rwkv6"))
    except MissingExtra as missing:
        console.print(f"No picture: {missing}", markup=False)
    return written


def _measured(name: str, variant: str, shape: Shape, seconds: float, with_loop: bool = True) -> Measurement:
    x = inputs(variant, shape)
    return measure(name, x, "fwd", [*([loop(x)] if with_loop else []), ours("auto", x, "fwd")], seconds)


def _sweep(shape: Shape, lengths: tuple[int, ...], seconds: float) -> list[Measurement]:
    """Measure every length; the token loop only as long as the time allows."""
    begin, found, with_loop = perf_counter(), [], True
    for T in lengths:
        before = perf_counter()
        found.append(_measured(f"rwkv6, T = {T}", "rwkv6", shape._replace(T=T), seconds, with_loop))
        with_loop = with_loop and perf_counter() - begin + 2 * (perf_counter() - before) < SWEEP_SECONDS
    return found


def print_models(console: Console, models: list[Measurement]) -> None:
    """Print a row for each of ``MODEL_ROWS``, within 80 columns."""
    console.print("\nOne layer's recurrence, forward, float32", style="table.title", highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("\nvariant, as in", "\nB,T,H,K,V"):
        table.add_column(name, no_wrap=True)
    for name in ("token\nloop", "\npenstock", "times\nas fast", "\nerror"):
        table.add_column(name, justify="right", no_wrap=True)
    for case, measured in zip(MODEL_ROWS, models):
        slow, auto = measured.timings
        times = Text(f"{slow.milliseconds / auto.milliseconds:.0f}", style="bold green")
        model = Text.assemble(case.variant, "\n", (case.model.partition(":")[0].partition(",")[0], "dim"))
        table.add_row(model, measured.shape.text, duration(slow.milliseconds), duration(auto.milliseconds), times, f"{auto.error:.0e}")
    console.print(table)


def _train(console: Console, folder: Path, seconds: float, machine: Machine, architecture: str) -> list[tuple[Path, str]]:
    """Train, and add the losses to the numbers that part 2 wrote."""
    trained = train(folder=folder, seconds=seconds, console=console, seed=0, architecture=architecture)
    console.print(f"{trained.parameters:,} parameters, {trained.tokens:,} tokens in {trained.seconds:.0f} s")
    console.print(f"loss [bold]{trained.loss_before:.3f}[/] before, [bold green]{trained.loss_after:.3f}[/] after. A sample:\n")
    console.print(trained.sample, markup=False, highlight=False)
    found = {name: getattr(trained, name) for name in ("parameters", "tokens", "seconds", "loss_before", "loss_after")}
    numbers, picture = folder / NUMBERS, folder / CURVE
    of_training = {"model": architecture} | found | {"curve": [point._asdict() for point in trained.curve]}
    content = json.loads(numbers.read_text("utf-8")) | {"training": of_training}
    numbers.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    written = [(trained.weights, "the trained model")]
    try:
        times, losses = [point.seconds for point in trained.curve], [point.loss for point in trained.curve]
        title = f"{architecture} of {trained.parameters:,} parameters, on bytes"
        place = f"{machine.device_name('cpu')}; penstock {machine.penstock}, torch {machine.torch}"
        plot_losses(times, losses, (trained.loss_before, trained.loss_after), picture, title, place)
        written.append((picture, "losses against time"))
    except MissingExtra:
        pass  # part 2 printed why
    return written
