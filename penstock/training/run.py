"""``penstock train``: a model, its data and transformers' Trainer, put together."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import Complaints, DeviceError, MissingExtra, RangeError
from ..models import CausalLM, Config, load, save
from ..models.tokenizers import Bytes, Tokenizer, World, load_tokenizer
from .data import IGNORED, Windows, collate, find_files, read
from .settings import ARCHITECTURES, FUNCTION, SCHEDULES, Settings, Training

STATE = "trainer_state.json"
"""What the Trainer writes last to a checkpoint: without it, the writing was interrupted."""
RESUMED = ("optimizer.pt", "scheduler.pt")
"""Without one of these the Trainer would go on with a new one."""
WORLD_ROWS = 65536
"""Embeddings of published models with World tokens."""


class Trained(NamedTuple):
    """The result of a training run."""

    folder: Path
    """The model; ``load`` takes it."""
    steps: int
    loss: float | None
    """The mean loss in nats per token since the last log entry before the end."""
    evaluation_loss: float | None
    """The loss of the evaluation text, if there is one."""


class Objective(nn.Module):
    """The loss of a batch. It is a module so that wrappers, as for several GPUs, see one forward pass.

    The Trainer's loss of an evaluation is the mean over samples. In evaluation mode the loss of a batch is therefore its sum divided by the
    labels that its samples would count if all were alike: the mean is then over labels.
    """

    def __init__(self, model: CausalLM, evaluation: Windows | None = None) -> None:
        super().__init__()
        self.model, self.evaluation = model, evaluation

    def forward(self, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> dict[str, Tensor]:
        """Mean loss in nats of the labels that are not ignored."""
        if not self.training and self.evaluation is not None:
            samples = ids.numel() / self.evaluation.length
            total = self.model.loss(ids, labels, cu_seqlens, ignore_index=IGNORED, reduction="sum")
            return {"loss": total / (samples * self.evaluation.counted)}
        return {"loss": self.model.loss(ids, labels, cu_seqlens, ignore_index=IGNORED)}


def train(settings: Settings, callbacks: tuple[Any, ...] = ()) -> Trained:
    """Train as the settings say, and save the model, its tokenizer and its checkpoints in ``training.output``.

    ``callbacks`` are for the Trainer. Raises RangeError, DtypeError, DeviceError or MissingExtra.
    """
    data, training = settings.data, settings.training
    device = find_device(training.device)
    files = find_files(data.train, FUNCTION, "data.train")
    others = find_files(data.evaluation, FUNCTION, "data.evaluation")
    output = Path(training.output)
    tokenizer, source = find_tokenizer(settings)
    torch.manual_seed(training.seed)
    model = find_model(settings, tokenizer)
    model.gradient_checkpointing = training.gradient_checkpointing
    samples, evaluation = (
        Windows(read(some, tokenizer, data.separator), data.length, packed=data.packing, argument=name) if some else None
        for some, name in ((files, "data.train"), (others, "data.evaluation"))
    )
    assert samples is not None

    def write(folder: Path) -> None:
        save(model, folder, overwrite=True)
        if source is not None:
            (folder / source.name).write_bytes(source.read_bytes())
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.end_of_text}), "utf-8")

    trainer = _trainer(Objective(model, evaluation), training, device, samples, evaluation, callbacks, write)
    checkpoint = _last_checkpoint(training, model.config)
    if checkpoint is not None and training.steps is not None and _steps(checkpoint) >= training.steps:
        # nothing is left to do; the Trainer would take one step more
        model.load_state_dict(load(checkpoint).state_dict())
        trainer.state = type(trainer.state).load_from_json(str(checkpoint / STATE))
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.is_world_process_zero():
        write(output)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = trainer.evaluate()["eval_loss"] if evaluation is not None else None
    return Trained(output, trainer.state.global_step, losses[-1] if losses else None, found)


def find_tokenizer(settings: Settings) -> tuple[Tokenizer, Path | None]:
    """The tokenizer, and the ``tokenizer.json`` that belongs beside the trained model."""
    name, path = settings.data.tokenizer, settings.model.get("path")
    if name is None and path is None:
        name = "bytes"
    if name in ("bytes", "bytes+end"):
        return Bytes(256 if name == "bytes" else 257), None
    if name == "world":
        return World(), None
    place = Path(name or path or "")
    tokenizer = load_tokenizer(place)
    file = place if place.name == "tokenizer.json" else (place if place.is_dir() else place.parent) / "tokenizer.json"
    return tokenizer, None if isinstance(tokenizer, Bytes | World) else file


def find_model(settings: Settings, tokenizer: Tokenizer) -> CausalLM:
    """The model of a checkpoint, or a new one whose ``vocab_size`` is the tokenizer's unless it is given."""
    if "path" in settings.model:
        model = deepcopy(load(settings.model["path"], dtype=torch.float32))  # its weights may be mapped from the files
    else:
        sizes = {name: value for name, value in settings.model.items() if name != "architecture"}
        rows = WORLD_ROWS if isinstance(tokenizer, World) else tokenizer.vocab_size
        model = CausalLM(ARCHITECTURES[settings.model["architecture"]](**{"vocab_size": rows, **sizes}))
    if model.config.vocab_size < tokenizer.vocab_size:
        complaints = Complaints(FUNCTION)
        rule = f"at least the tokenizer's {tokenizer.vocab_size}"
        complaints.add(RangeError, "model.vocab_size", rule, model.config.vocab_size, "Take the tokenizer that belongs to the model.")
        complaints.raise_any()
    return model


def find_device(name: str) -> str:
    """The device of ``training.device``. Raises DeviceError if torch cannot use it."""
    if name == "cuda" and not torch.cuda.is_available():
        complaints = Complaints(FUNCTION)
        complaints.add(DeviceError, "training.device", "one that torch can use", repr(name), "Take auto or cpu.")
        complaints.raise_any()
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _last_checkpoint(training: Training, config: Config) -> Path | None:
    """The last whole checkpoint, to go on from. Raises RangeError for one that does not belong to the settings."""
    folders = [one for one in Path(training.output).glob("checkpoint-*") if one.is_dir() and _steps(one) >= 0]
    found = max((one for one in folders if (one / STATE).is_file()), key=_steps, default=None)
    complaints = Complaints(FUNCTION)
    if folders and not training.resume:
        rule = "a folder without checkpoints if training.resume is false"
        complaints.add(RangeError, "training.output", rule, repr(training.output), "Name another folder, or remove the checkpoints.")
    elif found is not None and (missing := [name for name in RESUMED if not (found / name).is_file()]):
        value = f"{str(found)!r} without {' and '.join(missing)}"
        complaints.add(RangeError, "training.output", "a folder of whole checkpoints", value, "Remove this checkpoint.")
    elif found is not None and load(found).config != config:
        rule = "a folder whose checkpoints are of the same model"
        complaints.add(RangeError, "training.output", rule, repr(str(found)), "Name another folder, or remove the checkpoints.")
    complaints.raise_any()
    return found


def _steps(checkpoint: Path) -> int:
    """The number of steps before a checkpoint, by its name; -1 for another folder."""
    match = re.fullmatch(r"checkpoint-([0-9]+)", checkpoint.name, re.ASCII)
    return int(match[1]) if match else -1


def _trainer(
    objective: Objective, training: Training, device: str, samples: Windows, evaluation: Windows | None, callbacks: tuple[Any, ...],
    write: Callable[[Path], None],
) -> Any:  # fmt: skip
    """The Trainer. It saves and loads models as this package does, so that every checkpoint can be used."""
    try:
        from transformers import Trainer, TrainerCallback, TrainingArguments
    except ImportError as error:
        raise MissingExtra.of(FUNCTION, "transformers", "transformers") from error

    class Wired(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            if self.args.should_save:
                write(Path(output_dir or training.output))

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
            objective.model.load_state_dict(load(resume_from_checkpoint).state_dict())

        def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
            return [name for name, parameter in model.named_parameters() if parameter.dim() == 2 and name.endswith(".weight")]

    class Diverged(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            loss = (logs or {}).get("loss", 0.0)
            if not math.isfinite(loss):
                complaints = Complaints(FUNCTION)
                remedy = "Take a smaller training.learning_rate or a longer training.warmup, and another training.output."
                complaints.add(RangeError, "the loss", "a number", f"{loss} after {state.global_step} steps", remedy)
                complaints.raise_any()

    half = training.dtype == "bfloat16" or (training.dtype == "auto" and device == "cuda" and torch.cuda.is_bf16_supported())
    arguments = TrainingArguments(
        output_dir=training.output,
        max_steps=training.steps or -1,
        num_train_epochs=training.epochs,
        per_device_train_batch_size=training.batch_size,
        per_device_eval_batch_size=training.batch_size,
        gradient_accumulation_steps=training.accumulate,
        learning_rate=training.learning_rate,
        lr_scheduler_type=SCHEDULES[training.schedule],
        warmup_steps=training.warmup,
        weight_decay=training.weight_decay,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        max_grad_norm=training.clip,
        bf16=half,
        use_cpu=device == "cpu",
        seed=training.seed,
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,
        save_steps=training.save_every,
        save_total_limit=training.keep,
        eval_strategy="no" if evaluation is None else "steps",
        eval_steps=training.evaluate_every,
        prediction_loss_only=True,
        report_to=["tensorboard"] if training.tensorboard else [],
        dataloader_pin_memory=device == "cuda",
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs by torchrun, not by DataParallel, which would cut packed batches
    return Wired(objective, arguments, collate, samples, evaluation, callbacks=[Diverged(), *callbacks])
