"""``penstock train``: a model and its data in transformers' Trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ..errors import Complaints, DeviceError, MissingExtra, RangeError
from ..layers.keywords import suggestion
from ..models import CausalLM, load, save
from ..models.tokenizers import Bytes, Tokenizer, World, load_tokenizer
from .data import IGNORED, Windows, collate, find_files, read
from .progress import Say, about_data, about_model, teller
from .resuming import STATE, last_checkpoint, steps_before
from .schedule import rate
from .settings import ARCHITECTURES, FUNCTION, Settings, Training

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

    The Trainer's loss of an evaluation is the mean over samples. In evaluation mode the loss of a batch is therefore its sum, divided by
    (its number of samples) * (the mean number of labels per sample): so the mean is over labels.
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


def train(settings: Settings, callbacks: tuple[Any, ...] = (), say: Say = lambda line: None) -> Trained:
    """Train as the settings say, and save the model, its tokenizer and its checkpoints in ``training.output``.

    ``callbacks`` are for the Trainer; ``say`` gets lines about the run. Raises RangeError, DtypeError, DeviceError or MissingExtra.
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
        Windows(read(some, tokenizer, data.separator, argument=name), data.length, packed=data.packing, most=most, argument=name)
        if some
        else None
        for some, most, name in ((files, None, "data.train"), (others, training.evaluation_samples, "data.evaluation"))
    )
    assert samples is not None

    def write(folder: Path) -> None:
        save(model, folder, overwrite=True)
        if source is not None:
            (folder / source.name).write_bytes(source.read_bytes())
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.end_of_text}), "utf-8")

    checkpoint = last_checkpoint(training, model.config)
    half = training.dtype == "bfloat16" or (training.dtype == "auto" and device == "cuda" and torch.cuda.is_bf16_supported())
    about = [about_model(model, "bfloat16" if half else "float32", device), about_data(samples, evaluation)]
    about += [f"continues from {checkpoint}"] * (checkpoint is not None)
    trainer = _trainer(Objective(model, evaluation), training, device, half, samples, evaluation, write)
    for callback in (teller(say, about, samples), *callbacks):
        trainer.add_callback(callback)
    done = checkpoint is not None and training.steps is not None and steps_before(checkpoint) >= training.steps
    if done and checkpoint is not None:
        # nothing is left to do; the Trainer would take one more step
        model.load_state_dict(load(checkpoint).state_dict())
        trainer.state = type(trainer.state).load_from_json(str(checkpoint / STATE))
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.is_world_process_zero():
        write(output)
    step, logs = trainer.state.global_step, trainer.state.log_history
    losses = [entry["loss"] for entry in logs if "loss" in entry]
    evaluated = [] if done else [entry["eval_loss"] for entry in logs if "eval_loss" in entry and entry["step"] == step]
    found = None if evaluation is None else evaluated[-1] if evaluated else trainer.evaluate()["eval_loss"]
    return Trained(output, step, losses[-1] if losses else None, found)


def find_tokenizer(settings: Settings) -> tuple[Tokenizer, Path | None]:
    """The tokenizer, and the ``tokenizer.json`` to save with the trained model."""
    name, path = settings.data.tokenizer, settings.model.get("path")
    if name is None and path is None:
        name = "bytes"
    if name in ("bytes", "bytes+end"):
        return Bytes(256 if name == "bytes" else 257), None
    if name == "world":
        return World(), None
    place = Path(name or path or "")
    if name is not None and not place.exists() and len(place.parts) == 1:
        complaints = Complaints(FUNCTION)
        remedy = suggestion(name, ("bytes", "bytes+end", "world"))
        complaints.add(RangeError, "data.tokenizer", "bytes, bytes+end, world or the path of a tokenizer.json", repr(name), remedy)
        complaints.raise_any()
    tokenizer = load_tokenizer(place)
    file = place if place.name == "tokenizer.json" else (place if place.is_dir() else place.parent) / "tokenizer.json"
    return tokenizer, None if isinstance(tokenizer, Bytes | World) else file


def find_model(settings: Settings, tokenizer: Tokenizer) -> CausalLM:
    """The model of a checkpoint, or a new one; its ``vocab_size`` is the tokenizer's unless given."""
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


def _trainer(
    objective: Objective, training: Training, device: str, half: bool, samples: Windows, evaluation: Windows | None,
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

        def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
            if self.lr_scheduler is None:
                warmup = self.args.get_warmup_steps(num_training_steps)
                factor = partial(rate, schedule=training.schedule, warmup=warmup, steps=num_training_steps)
                chosen: Any = self.optimizer if optimizer is None else optimizer
                self.lr_scheduler = LambdaLR(chosen, factor)
            scheduler: LambdaLR = self.lr_scheduler
            return scheduler

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

    arguments = TrainingArguments(
        output_dir=training.output,
        max_steps=training.steps or -1,
        num_train_epochs=training.epochs,
        per_device_train_batch_size=training.batch_size,
        per_device_eval_batch_size=training.batch_size,
        gradient_accumulation_steps=training.accumulate,
        learning_rate=training.learning_rate,
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
    return Wired(objective, arguments, collate, samples, evaluation, callbacks=[Diverged()])
