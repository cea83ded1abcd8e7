"""transformers' Trainer, with our models, batches, checkpoints and sharding."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ..errors import Complaints, MissingExtra, RangeError
from ..models import CausalLM
from . import shards
from .batches import Batches, Loader
from .data import IGNORED, Windows
from .ranks import Context, Ranks
from .resuming import of_random, reading, whole_model
from .schedule import rate
from .settings import FUNCTION, Training


class Objective(nn.Module):
    """The loss of a batch. It is a module so that wrappers, as for several GPUs, see one forward pass.

    The Trainer's loss of an evaluation is the mean over batches. In evaluation mode the loss of a batch is therefore the sum, divided by
    the mean number of labels of a batch: so the mean is over labels.
    """

    def __init__(self, model: CausalLM, context: Context | None, scaled: bool, evaluated: float | None = None) -> None:
        """The loss of a model.

        context : function, optional
            The part of this rank of the tokens of a batch, and its context. Default: all tokens, without context.
        scaled : bool
            Whether the Trainer tells how many labels the batches of all ranks in a step have.
        evaluated : float, optional
            The mean number of labels of a batch of evaluation, on one rank.
        """
        super().__init__()
        self.model, self.context, self.accepts_loss_kwargs, self.evaluated = model, context, scaled, evaluated

    def forward(
        self, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None, num_items_in_batch: Tensor | int | None = None
    ) -> dict[str, Tensor]:
        """Mean loss in nats of the labels that are not ignored, or their sum over the number of labels of the whole step.

        Without any label it is 0, and so are its gradients: a part of a corpus may have none.
        """
        items, context, labelled = num_items_in_batch if self.training else self.evaluated, None, (labels != IGNORED).any()
        if self.context is not None:
            part, context = self.context(ids.shape[1], cu_seqlens)
            ids, labels, cu_seqlens = ids[:, part], labels[:, part], None
        if items is None:
            loss = self.model.loss(ids, labels, cu_seqlens, ignore_index=IGNORED, context=context)
            return {"loss": loss.where(labelled, 0)}
        return {"loss": self.model.loss(ids, labels, cu_seqlens, ignore_index=IGNORED, reduction="sum", context=context) / counted(items)}


def counted(items: Tensor | float) -> Tensor | float:
    """A number of labels to divide by: 1 in place of 0."""
    return items + (items == 0)


class Alone(nn.Module):
    """A module for which autocast is all that the Trainer adds: a sharded one synchronises its gradients itself."""

    def __init__(self, module: nn.Module, autocast: Callable[[], Any]) -> None:
        super().__init__()
        self.module, self.autocast = module, autocast

    def forward(self, **inputs: Any) -> Any:
        """The result of the module."""
        with self.autocast():
            return self.module(**inputs)


def make_arguments(training: Training, ranks: Ranks, device: str, half: bool, evaluates: bool) -> Any:
    """The Trainer's arguments."""
    try:
        from transformers import TrainingArguments
    except ImportError as error:
        raise MissingExtra.of(FUNCTION, "transformers", "transformers") from error
    arguments = TrainingArguments(
        output_dir=training.output,
        max_steps=training.steps or -1,
        num_train_epochs=training.epochs,
        per_device_train_batch_size=training.batch_size // ranks.dp,
        per_device_eval_batch_size=training.batch_size // ranks.dp,
        gradient_accumulation_steps=training.accumulate,
        average_tokens_across_devices=True,
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
        eval_strategy="steps" if evaluates else "no",
        eval_steps=training.evaluate_every,
        prediction_loss_only=True,
        report_to=["tensorboard"] if training.tensorboard else [],
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs by torchrun, not by DataParallel, which would cut packed batches
    return arguments


def make_trainer(
    model: CausalLM, training: Training, ranks: Ranks, arguments: Any, samples: Windows, evaluation: Windows | None,
    write: Callable[[Path, CausalLM, bool], None], sharded: bool, context: Context | None,
) -> Any:  # fmt: skip
    """The Trainer. It saves and loads models as this package does, so that every checkpoint can be used."""
    from transformers import Trainer, TrainerCallback
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

    pinned = not arguments.use_cpu
    batches = Batches(len(samples), training.batch_size, ranks, training.seed)
    measured = None if evaluation is None else Batches(len(evaluation), training.batch_size, ranks)
    labels = None if evaluation is None or measured is None else evaluation.counted * len(evaluation) / (len(measured) * ranks.count)

    class Wired(Trainer):
        def get_train_dataloader(self) -> Loader:
            return Loader(samples, batches, pinned)

        def steps_of_epochs(self) -> int:
            """The steps of ``epochs``, as the Trainer counts them. The last ones of an epoch may have fewer batches."""
            return math.ceil(training.epochs * math.ceil(len(batches) / training.accumulate))

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Loader:
            assert evaluation is not None
            assert measured is not None
            return Loader(evaluation, measured, pinned)

        def compute_loss(
            self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:  # fmt: skip
            items = num_items_in_batch if model.training else None
            # gradients are means over ranks; labels are counted by all ranks that share them
            outputs = model(**inputs) if items is None else model(**inputs, num_items_in_batch=items / (ranks.cp * ranks.count))
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

        def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
            if not sharded:
                super()._move_model_to_device(model, device)

        def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
            if not sharded:
                wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
                return wrapped
            return model if isinstance(model, Alone) else Alone(model, self.accelerator.autocast)

        # Checkpoints

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            if self.args.should_save:
                write(Path(output_dir or training.output), model, not sharded)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            if not sharded:
                super()._save_optimizer_and_scheduler(output_dir)
                return
            shards.write(Path(output_dir), model, _inner(self.optimizer))
            assert self.lr_scheduler is not None
            if self.args.should_save:
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
            restore_model(Path(resume_from_checkpoint), objective.model)

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            """The moments of the optimizer and the number of steps. Learning rates, betas and weight decay are those of this run."""
            if checkpoint is None:
                return
            found, optimizer, scheduler = Path(checkpoint), _inner(self.optimizer), self.lr_scheduler
            assert scheduler is not None
            chosen = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
            if shards.is_sharded(found):
                with reading(found, shards.FOLDER):
                    shards.restore(found, objective.model, optimizer)
            else:
                with reading(found, OPTIMIZER_NAME) as file:
                    state = torch.load(file, map_location="cpu", weights_only=True)
                    if sharded:
                        shards.adopt_optimizer(objective.model, optimizer, state)
                    else:
                        optimizer.load_state_dict(state)
            with reading(found, SCHEDULER_NAME) as file:
                saved, bases = torch.load(file, weights_only=True), scheduler.base_lrs
                rates = [base * factor(saved["last_epoch"]) for base, factor in zip(bases, scheduler.lr_lambdas)]
                scheduler.load_state_dict({**saved, "base_lrs": bases, "_last_lr": rates})
            for group, own, rate_now in zip(optimizer.param_groups, chosen, rates):
                group.update(own, lr=rate_now)

        def _load_rng_state(self, checkpoint: str | None) -> None:
            name = None if checkpoint is None else of_random(Path(checkpoint), ranks)
            if checkpoint is not None and name is not None:
                with reading(Path(checkpoint), name):
                    super()._load_rng_state(checkpoint)

        # The optimizer

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

    class OwnSteps(TrainerCallback):
        """The numbers of steps of this run, in place of those in the state of a checkpoint."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.compute_steps(args, state.max_steps)

    class Diverged(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            loss = (logs or {}).get("loss", 0.0)
            if not math.isfinite(loss):
                complaints = Complaints(FUNCTION)
                remedy = "Take a smaller training.learning_rate or a longer training.warmup, and another training.output."
                complaints.add(RangeError, "the loss", "a number", f"{loss} after {state.global_step} steps", remedy)
                complaints.raise_any()

    objective = Objective(model, context, ranks.count > 1 or training.accumulate > 1, labels)
    return Wired(objective, arguments, None, samples, evaluation, callbacks=[OwnSteps(), Diverged()])


def restore_model(checkpoint: Path, model: CausalLM) -> None:
    """Read the weights of a checkpoint."""
    if shards.is_sharded(checkpoint):
        with reading(checkpoint, shards.FOLDER):
            shards.restore_model(checkpoint, model)
    else:
        shards.adopt_model(model, whole_model(checkpoint).state_dict())


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that accelerate wraps."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found
