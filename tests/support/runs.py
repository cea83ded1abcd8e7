"""Training runs on several processes, as torchrun would start them."""

import json
import os
from pathlib import Path

from penstock.training.run import train
from penstock.training.settings import parse

LINES = "the cat sat on the mat. \n\n" * 19
MODELS = {
    "rwkv6": {"architecture": "rwkv6", "hidden_size": 16, "num_layers": 2, "head_size": 8, "mix_rank": 2, "decay_rank": 2},
    "mamba2": {"architecture": "mamba2", "hidden_size": 16, "num_layers": 2, "head_dim": 8, "state_size": 8},
}


def content(folder: Path, output: str, model: str = "rwkv6", mesh: dict | None = None, packing: bool = True, **training: object) -> dict:
    """15 samples in batches of 6: the last batch of an epoch is no multiple of 2 ranks."""
    (folder / "a.txt").write_text(LINES)
    data = {"train": str(folder / "a.txt"), "evaluation": str(folder / "a.txt"), "length": 30, "packing": packing, "separator": "\n\n"}
    common = {
        "output": str(folder / output), "steps": 7, "batch_size": 6, "learning_rate": 1e-2, "log_every": 1, "save_every": 3, "warmup": 0,
        "schedule": "linear", "tensorboard": False, "device": "cpu", "evaluate_every": 100,
    }  # fmt: skip
    return {"model": MODELS[model], "data": data, "training": {**common, **training}, "mesh": mesh or {}}


class Stop:
    """A callback that ends a run after this many steps, as an interruption would."""

    def __new__(cls, steps):
        from transformers import TrainerCallback

        class Stopping(TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                control.should_training_stop = state.global_step == steps

        return Stopping()


def losses(settings: dict, stop: int = 0) -> tuple[list[float], float]:
    """The loss of every step of a run, and that of its evaluation; the steps before a checkpoint are counted, too."""
    seen: list[float] = []

    def watch():
        from transformers import TrainerCallback

        class Watch(TrainerCallback):
            def on_log(self, args, state, control, **_):
                seen[:] = [entry["loss"] for entry in state.log_history if "loss" in entry]

        return Watch()

    trained = train(parse(settings), (watch(), *([Stop(stop)] if stop else ())))
    return list(seen), trained.evaluation_loss


def run(rank: int, ranks: int, cases: dict[str, tuple], found: str) -> None:
    """Runs one after the other; the first rank writes their losses as JSON."""
    os.environ.update(WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    every = {name: losses(*given) for name, given in cases.items()}
    if rank == 0:
        Path(found).write_text(json.dumps(every))
