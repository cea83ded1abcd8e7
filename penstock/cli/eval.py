"""``penstock eval``: associative recall of a newly trained model, and perplexity of a checkpoint."""

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
from ..models import CausalLM, load
from ..models.tokenizers import load_tokenizer
from ..training.mqar import Point, Recall, learn, model_config
from ..training.scoring import perplexity
from ..training.settings import ARCHITECTURES
from .download import Download, checkpoint
from .options import DTYPES, Threads, check_device, check_names, check_seconds, check_seed, use_cores
from .outputs import check_outputs

TASKS = ("mqar", "perplexity")
OF_TASK = {
    "mqar": ("architecture", "pairs", "length", "vocab_size", "hidden_size", "num_layers", "seconds", "enough", "seed"),
    "perplexity": ("model", "text", "window", "tokenizer", "dtype", "download"),
}
"""Options of one task only."""


def evaluate(
    context: typer.Context,
    task: Annotated[str, typer.Option(help="mqar: train a small model to recall pairs. perplexity: loss of a checkpoint on a text.")],
    model: Annotated[Path | None, typer.Option(metavar="PATH", help="perplexity: checkpoint, a file or a folder.")] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="perplexity: text in UTF-8.")] = None,
    window: Annotated[int, typer.Option(help="perplexity: tokens of a window; the state is carried on.", min=1)] = 2048,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="perplexity: a tokenizer.json. Default: found with the model.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="perplexity: dtype of the weights.")] = "float32",
    architecture: Annotated[str, typer.Option(help="mqar: a name of penstock.models.")] = "gla",
    pairs: Annotated[int, typer.Option(help="mqar: pairs, and queries.")] = 8,
    length: Annotated[int, typer.Option(help="mqar: tokens of a sequence.")] = 64,
    vocab_size: Annotated[int, typer.Option(help="mqar: keys and values.")] = 8192,
    hidden_size: Annotated[int, typer.Option(help="mqar: size of the model.", min=16)] = 128,
    num_layers: Annotated[int, typer.Option(help="mqar: layers of the model.", min=1)] = 2,
    seconds: Annotated[float, typer.Option(help="mqar: training time.")] = 300.0,
    enough: Annotated[float, typer.Option(help="mqar: end the training at this accuracy.", min=0.0, max=1.0)] = 0.99,
    seed: Annotated[int, typer.Option(help="mqar: seed of the model and of the sequences.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if there is one.")] = None,
    threads: Threads = None,
    download: Download = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers to this file.")] = None,
) -> None:
    """Evaluate a model: recall of pairs that it has just seen (mqar), or the loss of a text (perplexity).

    mqar is multi-query associative recall (arXiv 2312.04927). It trains a new model on random sequences.

    [bold]Examples[/bold]

      penstock eval --task mqar --architecture rwkv6 --pairs 8 --seconds 600

      penstock eval --task perplexity --model runs/small --text book.txt
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    complaints = Complaints("eval")
    check_names(complaints, "task", [task], TASKS)
    _check_belonging(complaints, context, task)
    check_device(complaints, device)
    check_names(complaints, "dtype", [dtype], DTYPES)
    check_names(complaints, "architecture", [architecture], sorted(ARCHITECTURES))
    check_seconds(complaints, seconds)
    check_seed(complaints, seed)
    for name, given in (("model", model), ("text", text)):
        if task == "perplexity" and given is None:
            complaints.add(RangeError, name, "given for perplexity", "none", f"Add --{name}.")
    complaints.raise_any()
    check_outputs("eval", {"--json": json_file})
    content = read_text(text, "eval", "text") if text is not None else ""
    place = checkpoint("eval", "model", model, download) if model is not None else Path()
    machine = use_cores(context, threads, device)
    if task == "mqar":
        found = _recall(architecture, Recall(pairs, length, vocab_size), hidden_size, num_layers, seconds, enough, seed, device)
    else:
        found = {"text": str(text), **_perplexity(place, content, window, tokenizer, dtype, device)}
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        numbers = {"task": task, "device": device, **found, "machine": asdict(machine)}
        json_file.write_text(json.dumps(numbers, indent=2) + "\n", "utf-8")


def _check_belonging(complaints: Complaints, context: typer.Context, task: str) -> None:
    """Check that no option of another task is given."""
    for other, names in OF_TASK.items():
        for name in names:
            source = context.get_parameter_source(name)
            if task in TASKS and other != task and source is not None and source.name == "COMMANDLINE":
                complaints.add(RangeError, name, f"given for {other} only", f"--task {task}")


def _recall(
    architecture: str, recall: Recall, hidden_size: int, num_layers: int, seconds: float, enough: float, seed: int, device: str
) -> dict[str, Any]:
    recall.check()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CausalLM(model_config(architecture, recall, hidden_size, num_layers)).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console = Console(highlight=False)
    console.print(
        f"{architecture}, {parameters:,} parameters; {recall.pairs} pairs, {recall.length} tokens, vocabulary {recall.vocab_size}"
    )

    def report(point: Point) -> None:
        console.print(f"{point.seconds:6.0f} s  {point.steps:7,} steps  {100 * point.accuracy:5.1f} % of the queries right")

    points = learn(model, recall, seconds, seed, enough, report)
    sizes = {"architecture": architecture, "hidden_size": hidden_size, "num_layers": num_layers, "parameters": parameters, "seed": seed}
    return {**sizes, **recall._asdict(), "accuracy": points[-1].accuracy, "curve": [point._asdict() for point in points]}


def _perplexity(model: Path, text: str, window: int, tokenizer: Path | None, dtype: str, device: str) -> dict[str, Any]:
    coder = load_tokenizer(tokenizer or model)
    found = perplexity(load(model, dtype=DTYPES[dtype], device=device), coder, text, window)
    typer.echo(f"{found.nats_per_byte:.4f} nats a byte, {found.nats_per_token:.4f} nats a token, perplexity {found.perplexity:.3f}")
    typer.echo(f"{found.tokens:,} tokens of {found.bytes:,} bytes")
    means = {name: getattr(found, name) for name in ("nats_per_byte", "nats_per_token", "perplexity")}
    return {"model": str(model), "window": window, "dtype": dtype, **found._asdict(), **means}
