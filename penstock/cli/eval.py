"""``penstock eval``: synthetic tasks that a new model learns, and perplexity of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..errors import Complaints, RangeError
from ..files import read_text
from ..layers.quantization import KINDS
from ..models import CausalLM, load
from ..models.tokenizers import load_tokenizer
from ..training.data import is_lines
from ..training.mqar import Recall
from ..training.reversal import Reversal
from ..training.scoring import perplexity
from ..training.settings import ARCHITECTURES
from ..training.synthetic import Point, Task, learn, model_config
from .download import Download, checkpoint
from .options import DTYPES, Threads, check_device, check_names, check_seconds, check_seed, use_cores
from .outputs import check_outputs

NONE = "none"
"""The name of unquantized weights."""
_LEARNING = ("architecture", "hidden_size", "num_layers", "seconds", "enough", "seed")
OF_TASK = {
    "mqar": ("pairs", "length", "vocab_size", *_LEARNING),
    "reversal": ("digits", *_LEARNING),
    "perplexity": ("model", "text", "window", "tokenizer", "dtype", "quantize", "download"),
}
"""The options of each task that others may not have."""


def evaluate(
    context: typer.Context,
    task: Annotated[
        str, typer.Option(help="mqar: a new model learns recall of pairs. reversal: that of digits. perplexity: loss of a checkpoint.")
    ],
    model: Annotated[Path | None, typer.Option(metavar="PATH", help="perplexity: checkpoint, a file or a folder.")] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="perplexity: text in UTF-8.")] = None,
    window: Annotated[int, typer.Option(help="perplexity: tokens of a window; the state is carried on.", min=1)] = 2048,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="perplexity: a tokenizer.json. Default: found with the model.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="perplexity: dtype of the weights.")] = "float32",
    quantize: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="perplexity: weights of 8 or 4 bits, int8 or int4; none. Several, to compare: give it again."),
    ] = None,
    architecture: Annotated[str, typer.Option(help="mqar, reversal: a name of penstock.models.")] = "gla",
    pairs: Annotated[int, typer.Option(help="mqar: pairs, and queries.")] = 8,
    length: Annotated[int, typer.Option(help="mqar: tokens of a sequence.")] = 64,
    vocab_size: Annotated[int, typer.Option(help="mqar: keys and values.")] = 8192,
    digits: Annotated[int, typer.Option(help="reversal: the most digits of a number.")] = 16,
    hidden_size: Annotated[int, typer.Option(help="mqar, reversal: size of the model.", min=16)] = 128,
    num_layers: Annotated[int, typer.Option(help="mqar, reversal: layers of the model.", min=1)] = 2,
    seconds: Annotated[float, typer.Option(help="mqar, reversal: training time.")] = 300.0,
    enough: Annotated[float, typer.Option(help="mqar, reversal: end the training at this accuracy.", min=0.0, max=1.0)] = 0.99,
    seed: Annotated[int, typer.Option(help="mqar, reversal: seed of the model and of the sequences.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if there is one.")] = None,
    threads: Threads = None,
    download: Download = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers to this file.")] = None,
) -> None:
    """Evaluate a new model that learns recall of pairs (mqar) or reversal of digits (reversal), or a checkpoint by the loss of a text.

    mqar is multi-query associative recall (arXiv 2312.04927). Both tasks train a new model on random sequences until it is right often
    enough or the time has passed.

    [bold]Examples[/bold]

      penstock eval --task mqar --architecture rwkv6 --pairs 8 --seconds 600

      penstock eval --task reversal --architecture rwkv7 --digits 16

      penstock eval --task perplexity --model runs/small --text book.txt
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    complaints = Complaints("eval")
    check_names(complaints, "task", [task], OF_TASK)
    _check_belonging(complaints, context, task)
    check_device(complaints, device)
    check_names(complaints, "dtype", [dtype], DTYPES)
    check_names(complaints, "quantize", quantize or (), (NONE, *KINDS))
    check_names(complaints, "architecture", [architecture], sorted(ARCHITECTURES))
    check_seconds(complaints, seconds)
    check_seed(complaints, seed)
    for name, given in (("model", model), ("text", text)):
        if task == "perplexity" and given is None:
            complaints.add(RangeError, name, "given for perplexity", "none", f"Add --{name}.")
    if text is not None and is_lines(text):
        complaints.add(RangeError, "text", "one text", f"documents in lines of JSON, {str(text)!r}", "Write them to a text file.")
    complaints.raise_any()
    check_outputs("eval", {"--json": json_file})
    content = read_text(text, "eval", "text") if text is not None else ""
    place = checkpoint("eval", "model", model, download) if model is not None else Path()
    machine = use_cores(context, threads, device)
    if task == "perplexity":
        found = {"text": str(text), **_perplexity(place, content, window, tokenizer, dtype, device, quantize or [NONE])}
    else:
        drawn: Recall | Reversal = Recall(pairs, length, vocab_size) if task == "mqar" else Reversal(digits)
        drawn.check()
        found = drawn._asdict() | _learned(architecture, drawn, hidden_size, num_layers, seconds, enough, seed, device)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        numbers = {"task": task, "device": device, **found, "machine": asdict(machine)}
        json_file.write_text(json.dumps(numbers, indent=2) + "\n", "utf-8")


def _check_belonging(complaints: Complaints, context: typer.Context, task: str) -> None:
    """Check that no option of other tasks is given."""
    for name in dict.fromkeys(name for names in OF_TASK.values() for name in names):
        source, tasks = context.get_parameter_source(name), [one for one, names in OF_TASK.items() if name in names]
        if task in OF_TASK and task not in tasks and source is not None and source.name == "COMMANDLINE":
            complaints.add(RangeError, name, f"given for {' and '.join(tasks)} only", f"--task {task}")


def _learned(
    architecture: str, task: Task, hidden_size: int, num_layers: int, seconds: float, enough: float, seed: int, device: str
) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CausalLM(model_config(architecture, task, hidden_size, num_layers)).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console = Console(highlight=False)
    console.print(f"{architecture}, {parameters:,} parameters; {task}")

    def report(point: Point) -> None:
        console.print(f"{point.seconds:6.0f} s  {point.steps:7,} steps  {100 * point.accuracy:5.1f} % right")

    points = learn(model, task, seconds, seed, enough, report)
    sizes = {"architecture": architecture, "hidden_size": hidden_size, "num_layers": num_layers, "parameters": parameters, "seed": seed}
    return {**sizes, "accuracy": points[-1].accuracy, "curve": [point._asdict() for point in points]}


def _perplexity(
    model: Path, text: str, window: int, tokenizer: Path | None, dtype: str, device: str, kinds: list[str]
) -> dict[str, Any]:  # fmt: skip
    """The numbers of a checkpoint with each of these kinds of weights, the first ones also on their own."""
    coder, found = load_tokenizer(tokenizer or model), {}
    for kind in dict.fromkeys(kinds):
        weights = load(model, dtype=DTYPES[dtype], device=device, quantize=None if kind == NONE else kind)  # type: ignore[arg-type]
        one = perplexity(weights, coder, text, window)
        del weights
        title = "" if kind == NONE else f"{kind}: "
        typer.echo(f"{title}{one.nats_per_byte:.4f} nats a byte, {one.nats_per_token:.4f} nats a token, perplexity {one.perplexity:.3f}")
        found[kind] = {**one._asdict(), **{name: getattr(one, name) for name in ("nats_per_byte", "nats_per_token", "perplexity")}}
    first, *others = found
    for kind in others:
        change = 100 * (found[kind]["perplexity"] / found[first]["perplexity"] - 1)
        typer.echo(f"perplexity of {kind}: {change:+.3f} % of that of {first}")
    typer.echo(f"{found[first]['tokens']:,} tokens of {found[first]['bytes']:,} bytes")
    return {"model": str(model), "window": window, "dtype": dtype, **found[first], "quantize": found}
