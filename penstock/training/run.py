"""``penstock train``: a model and its data in transformers' Trainer."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..distributed import shard
from ..errors import Complaints, DeviceError, RangeError
from ..layers.keywords import suggestion
from ..models import CausalLM, load, save
from ..models.checkpoints.native import stored
from ..models.tokenizers import Bytes, Tokenizer, World, ends_of, load_tokenizer
from .data import Windows, find_files, is_text, read
from .progress import Say, about_data, about_model, teller
from .ranks import context_of, find_ranks, join
from .resuming import last_checkpoint, read_state, steps_before
from .settings import ARCHITECTURES, FUNCTION, Mesh, Settings
from .shards import gathered
from .trainer import make_arguments, make_trainer, restore_model

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
    first: bool = True
    """Whether this is the first of several processes."""


def train(settings: Settings, callbacks: tuple[Any, ...] = (), say: Say = lambda line: None) -> Trained:
    """Train as the settings say, and save the model, its tokenizer and its checkpoints in ``training.output``.

    Every process that ``torchrun`` starts calls it. ``callbacks`` are for the Trainer; ``say`` gets lines about the run, in the first of
    them. Raises RangeError, DtypeError, DeviceError or MissingExtra.
    """
    data, training = settings.data, settings.training
    device, ranks = find_device(training.device), find_ranks(settings)
    files = find_files(data.train, FUNCTION, "data.train")
    others = find_files(data.evaluation, FUNCTION, "data.evaluation")
    if data.separator is not None and not any(map(is_text, (*files, *others))):
        complaints = Complaints(FUNCTION)
        remedy = "Documents of tokens and of .jsonl files have ends of their own."
        complaints.add(RangeError, "data.separator", "left out if no file is text", repr(data.separator), remedy)
        complaints.raise_any()
    output = Path(training.output)
    tokenizer, source = find_tokenizer(settings)
    torch.manual_seed(training.seed)
    model = find_model(settings, tokenizer)
    model.gradient_checkpointing = training.gradient_checkpointing
    needed = any(map(is_text, files))  # one document may be evaluated on beside text that is divided

    def sampled(some: list[Path], name: str, divided: bool, most: int | None = None) -> Windows:
        corpus = read(some, tokenizer, data.separator, argument=name, divided=divided)
        return Windows(corpus, data.length, packed=data.packing, most=most, argument=name)

    samples = sampled(files, "data.train", True)
    evaluation = sampled(others, "data.evaluation", not needed, training.evaluation_samples) if others else None

    def write(folder: Path, whole: CausalLM, weights: bool = True) -> None:
        if weights:
            save(whole, folder, overwrite=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(stored(whole.config), indent=2), "utf-8")
        if source is not None:
            (folder / source.name).write_bytes(source.read_bytes())
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": _ends(tokenizer)}), "utf-8")

    checkpoint = last_checkpoint(training, model.config)
    half = training.dtype == "bfloat16" or (training.dtype == "auto" and device == "cuda" and torch.cuda.is_bf16_supported())
    about = [about_model(model, "bfloat16" if half else "float32", device, ranks, settings.mesh), about_data(samples, evaluation)]
    about += [f"continues from {checkpoint}"] * (checkpoint is not None)
    join(ranks, device)
    arguments = make_arguments(training, ranks, device, half, evaluation is not None)
    state = None if checkpoint is None else read_state(checkpoint)
    if sharded := settings.mesh.shard and ranks.count > 1:
        shard(model, **_sharding(settings.mesh, device, ranks.count))
    trainer = make_trainer(model, training, ranks, arguments, samples, evaluation, write, sharded, context_of(ranks, device))
    for callback in (teller(say, about, samples, training), *callbacks):
        trainer.add_callback(callback)
    done = checkpoint is not None and steps_before(checkpoint) >= (training.steps or trainer.steps_of_epochs())
    if done and checkpoint is not None:
        # nothing is left to do; the Trainer would take one more step
        restore_model(checkpoint, model)
        trainer.state = state
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    step, logs = trainer.state.global_step, trainer.state.log_history
    losses = [entry["loss"] for entry in logs if "loss" in entry]
    evaluated = [] if done else [entry["eval_loss"] for entry in logs if "eval_loss" in entry and entry["step"] == step]
    found = None if evaluation is None else evaluated[-1] if evaluated else trainer.evaluate()["eval_loss"]
    whole = gathered(model) if sharded else model
    if whole is not None and trainer.is_world_process_zero():
        write(output, whole)
    return Trained(output, step, losses[-1] if losses else None, found, trainer.is_world_process_zero())


def _ends(tokenizer: Tokenizer) -> int | list[int] | None:
    """The tokens that end an answer, as transformers' files have them: the one that ends a text is the first."""
    end = tokenizer.end_of_text
    others = sorted(ends_of(tokenizer) - {end})
    return end if end is None or not others else [end, *others]


def _sharding(mesh: Mesh, device: str, count: int) -> dict[str, Any]:
    """The arguments of ``shard``."""
    from torch.distributed.device_mesh import init_device_mesh

    dtypes = {
        name: None if value is None else getattr(torch, value)
        for name, value in (("param_dtype", mesh.param_dtype), ("reduce_dtype", mesh.reduce_dtype))
    }
    return {
        "mesh": init_device_mesh(device, (count,), mesh_dim_names=("ranks",)),
        **dtypes,
        "reshard_after_forward": mesh.reshard_after_forward,
        "cpu_offload": mesh.cpu_offload,
    }


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
