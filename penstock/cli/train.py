"""``penstock train``: training, configured by a YAML file."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..training.ranks import leave
from ..training.resuming import after_interruption
from ..training.run import find_device
from ..training.run import train as run
from ..training.settings import read
from .download import Download, checkpoint
from .generate import INTERRUPTED
from .options import Threads, use_cores
from .outputs import Folder, check_outputs


def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The settings; docs/training.md lists them.")],
    threads: Threads = None,
    download: Download = False,
) -> None:
    """Train a model, new or from a checkpoint, on text or tokens.

    Writes the model, checkpoints, and events for TensorBoard. The same command continues after an interruption.

    [bold]Examples[/bold]

      penstock train small.yaml

      torchrun --nproc-per-node 8 -m penstock train small.yaml

      tensorboard --logdir runs/small
    """
    settings = read(config)
    if "path" in settings.model:
        path = checkpoint("train", "model.path", Path(settings.model["path"]), download)
        settings = replace(settings, model={"path": str(path)})
    check_outputs("train", {}, Folder("training.output", Path(settings.training.output), ()))
    use_cores(context, threads, find_device(settings.training.device))
    try:
        trained = run(settings, say=_say)
    except KeyboardInterrupt:
        typer.echo(f"\nInterrupted. {after_interruption(settings.training)}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    leave()
    if not trained.first:
        return
    losses = [("training", trained.loss), ("evaluation", trained.evaluation_loss)]
    found = ", ".join(f"{name} loss {loss:.4f} nats a token" for name, loss in losses if loss is not None)
    typer.echo(f"{trained.steps} steps{f', {found}' * bool(found)}")
    typer.echo(f"penstock generate --model {trained.folder} --prompt TEXT")


def _say(line: str) -> None:
    """Print a line above the progress bar of the training."""
    from tqdm import tqdm  # a dependency of transformers

    tqdm.write(line, file=sys.stderr)
