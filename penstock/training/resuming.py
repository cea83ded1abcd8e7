"""The checkpoints of a training run, and the one from which it continues."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import Complaints, RangeError, shortened
from ..models import CausalLM, Config, load
from ..models.checkpoints.distributed import METADATA
from .ranks import Ranks
from .settings import FUNCTION, Training
from .shards import FOLDER

STATE = "trainer_state.json"
"""The file that the Trainer writes last to a checkpoint. Without it, the writing was interrupted."""
RESUMED = ("optimizer.pt", "scheduler.pt")
"""Files that the Trainer would silently replace by new state if they are missing."""
SHARDED = (f"{FOLDER}/{METADATA}", "scheduler.pt")
"""The same files of sharded models."""


RANDOM = "rng_state.pth"
"""The file with the states of random numbers of one process; of several, each has its own, as ``rng_state_0.pth``."""


def last_whole(output: Path, before: float = float("inf")) -> Path | None:
    """The last complete checkpoint of fewer steps than ``before``."""
    found = (one for one in _folders(output) if steps_before(one) < before and (one / STATE).is_file())
    return max(found, key=steps_before, default=None)


def last_checkpoint(training: Training, config: Config) -> Path | None:
    """The last complete checkpoint, to continue from. Raises RangeError for one that does not belong to the settings."""
    output = Path(training.output)
    found = last_whole(output)
    complaints = Complaints(FUNCTION)
    if _folders(output) and not training.resume:
        rule = "a folder without checkpoints if training.resume is false"
        complaints.add(RangeError, "training.output", rule, repr(training.output), "Name another folder, or remove the checkpoints.")
    elif found is not None and (missing := _missing(found)):
        complaints.add(RangeError, *_not_whole(found, f"{str(found)!r} without {' and '.join(missing)}"))
    elif found is not None and _config(found) != config:
        rule = "a folder whose checkpoints are of the same model"
        complaints.add(RangeError, "training.output", rule, repr(str(found)), "Name another folder, or remove the checkpoints.")
    complaints.raise_any()
    return found


def _missing(checkpoint: Path) -> list[str]:
    """The files without which a run cannot continue from a checkpoint."""
    needed = [*(SHARDED if (checkpoint / FOLDER).is_dir() else RESUMED), *_of_random(checkpoint)]
    return [name for name in needed if not (checkpoint / name).is_file()]


def _of_random(checkpoint: Path) -> list[str]:
    """The names of the files with states of random numbers: those of all ranks up to the last one that has a file."""
    found = [re.fullmatch(r"rng_state_([0-9]{1,9})\.pth", one.name, re.ASCII) for one in checkpoint.glob("rng_state_*.pth")]
    last = max((int(match[1]) for match in found if match), default=None)
    return [RANDOM] if last is None or (checkpoint / RANDOM).is_file() else [f"rng_state_{rank}.pth" for rank in range(last + 1)]


def of_random(checkpoint: Path, ranks: Ranks) -> str | None:
    """The name of the file with the states of random numbers of a rank; None if another number of ranks wrote the checkpoint."""
    names = _of_random(checkpoint)
    return names[ranks.rank] if len(names) == ranks.count else None


def _config(checkpoint: Path) -> Config:
    if not (checkpoint / FOLDER).is_dir():
        return whole_model(checkpoint).config
    with reading(checkpoint, "config.json") as file:
        return Config.from_dict(json.loads(file.read_text("utf-8"))["model"])


def whole_model(checkpoint: Path) -> CausalLM:
    """The model of a checkpoint that is not sharded. Raises RangeError if a file of it is damaged."""
    with reading(checkpoint) as folder:
        return load(folder)


def _not_whole(checkpoint: Path, value: str) -> tuple[str, str, str, str]:
    """The argument, the rule, the value and the remedy for a checkpoint that is not whole."""
    before = last_whole(checkpoint.parent, steps_before(checkpoint))
    then = "begins again" if before is None else f"continues from {before}"
    return "training.output", "a folder of whole checkpoints", value, f"Remove this checkpoint: the same command then {then}."


@contextmanager
def reading(checkpoint: Path, name: str = "") -> Iterator[Path]:
    """Raises RangeError for any error in this block, which reads a file of a checkpoint, but for a lack of memory or permission.

    Without a ``name``, it reads several, and its errors name the one.
    """
    file = checkpoint / name
    try:
        yield file
    except (PermissionError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damaged bytes can raise any error
        said = isinstance(error, OSError | RuntimeError | ValueError)  # other messages also advise to run code of the file
        reason = str(error).strip().partition("\n")[0].rstrip(".") if said else ""
        complaints = Complaints(FUNCTION)
        complaints.add(RangeError, *_not_whole(checkpoint, f"{str(file)!r} ({reason or 'it is damaged'})"))
        complaints.raise_any()


def read_state(checkpoint: Path) -> Any:
    """The Trainer's state of a checkpoint. Raises RangeError if it is damaged."""
    from transformers import TrainerState

    with reading(checkpoint, STATE) as file:
        found = TrainerState.load_from_json(str(file))
        if found.global_step != steps_before(checkpoint):
            raise ValueError(f"it is of step {shortened(found.global_step)}")
        return found


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
