"""The checkpoints of a training run, and the one from which it continues."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ..errors import Complaints, RangeError
from ..models import Config, load
from ..models.checkpoints.distributed import METADATA
from .settings import FUNCTION, Training
from .shards import FOLDER

STATE = "trainer_state.json"
"""The file that the Trainer writes last to a checkpoint. Without it, the writing was interrupted."""
RESUMED = ("optimizer.pt", "scheduler.pt")
"""Files that the Trainer would silently replace by new state if they are missing."""
SHARDED = (f"{FOLDER}/{METADATA}", "scheduler.pt")
"""The same files of sharded models."""


def last_whole(output: Path) -> Path | None:
    """The last complete checkpoint."""
    return max((one for one in _folders(output) if (one / STATE).is_file()), key=steps_before, default=None)


def last_checkpoint(training: Training, config: Config) -> Path | None:
    """The last complete checkpoint, to continue from. Raises RangeError for one that does not belong to the settings."""
    output = Path(training.output)
    found = last_whole(output)
    complaints = Complaints(FUNCTION)
    if _folders(output) and not training.resume:
        rule = "a folder without checkpoints if training.resume is false"
        complaints.add(RangeError, "training.output", rule, repr(training.output), "Name another folder, or remove the checkpoints.")
    elif found is not None and (missing := _missing(found)):
        value = f"{str(found)!r} without {' and '.join(missing)}"
        complaints.add(RangeError, "training.output", "a folder of whole checkpoints", value, "Remove this checkpoint.")
    elif found is not None and _config(found) != config:
        rule = "a folder whose checkpoints are of the same model"
        complaints.add(RangeError, "training.output", rule, repr(str(found)), "Name another folder, or remove the checkpoints.")
    complaints.raise_any()
    return found


def _missing(checkpoint: Path) -> list[str]:
    """The files without which a run cannot continue from a checkpoint."""
    return [name for name in (SHARDED if (checkpoint / FOLDER).is_dir() else RESUMED) if not (checkpoint / name).is_file()]


def _config(checkpoint: Path) -> Config:
    if not (checkpoint / FOLDER).is_dir():
        return load(checkpoint).config
    return Config.from_dict(json.loads((checkpoint / "config.json").read_text("utf-8"))["model"])


def after_interruption(training: Training) -> str:
    """A message about what the same command does after an interruption."""
    found = last_whole(Path(training.output))
    if found is None:
        return f"There is no checkpoint yet (training.save_every is {training.save_every} steps): the same command begins again."
    if not training.resume:
        return f"The last checkpoint is {found}. The command continues from it with training.resume: true."
    return f"The same command continues from {found}."


def steps_before(checkpoint: Path) -> int:
    """The number of steps before a checkpoint, by its name; -1 for another folder."""
    match = re.fullmatch(r"checkpoint-([0-9]+)", checkpoint.name, re.ASCII)
    return int(match[1]) if match else -1


def _folders(output: Path) -> list[Path]:
    return [one for one in output.glob("checkpoint-*") if one.is_dir() and steps_before(one) >= 0]
