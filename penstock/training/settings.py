"""The YAML file of ``penstock train``: four sections, each a dataclass. Every other key is an error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .. import models
from ..errors import Complaints, DtypeError, MissingExtra, RangeError, described
from ..files import read_text
from ..layers.keywords import suggestion
from .schedule import SCHEDULES

FUNCTION = "train"
MAX_SEED = 2**32 - 1
"""numpy's limit, because the Trainer seeds numpy, too."""
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class Data:
    """The section ``data``."""

    train: tuple[str, ...]
    """Files or patterns: text in UTF-8, ``.jsonl`` with a ``"text"`` a line, or tokens as ``.npy`` (integers) or ``.bin`` (uint16)."""
    evaluation: tuple[str, ...] = ()
    """Likewise, for the loss on other text."""
    tokenizer: str | None = None
    """``bytes``, ``bytes+end`` (257 tokens), ``world``, or the path of a tokenizer.json. Default: the model's, or ``bytes``."""
    length: int = 512
    """Tokens of a sample."""
    packing: bool = False
    """Whether the state is reset at each document of a sample."""
    separator: str | None = None
    """The text between the documents of a text file. Default: a file is one document."""


@dataclass(frozen=True)
class Training:
    """The section ``training``."""

    output: str
    """Folder for the model, its checkpoints and the events of TensorBoard."""
    steps: int | None = None
    """Optimizer steps; without it, ``epochs``."""
    epochs: float = 1.0
    batch_size: int = 8
    """Samples of one forward pass, of all ranks together."""
    accumulate: int = 1
    """Forward passes of one step."""
    learning_rate: float = 6e-4
    schedule: str = "cosine"
    """``cosine``, ``linear`` or ``constant``, after the warm-up."""
    warmup: float = 0.05
    """Steps in which the learning rate rises; below 1, a fraction of all steps."""
    weight_decay: float = 0.1
    """The weight decay of linear maps and embeddings; vectors, low-rank maps and convolutions have none."""
    betas: tuple[float, ...] = (0.9, 0.95)
    clip: float = 1.0
    """Largest norm of the gradients."""
    dtype: str = "auto"
    """``bfloat16`` is autocast, with float32 weights. ``auto`` takes it on GPUs that have it."""
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: a GPU if there is one."""
    seed: int = 0
    gradient_checkpointing: bool | Literal["selective"] = False
    """``selective`` recomputes only what takes little time; true recomputes all but the inputs of layers."""
    resume: bool = True
    """Continue from the last checkpoint in ``output``, if there is one."""
    save_every: int = 500
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept."""
    evaluate_every: int = 500
    """Steps between evaluations."""
    evaluation_samples: int | None = 512
    """The first samples of the evaluation text that are evaluated; none: all."""
    log_every: int = 10
    """Steps between values of the loss."""
    tensorboard: bool = True


@dataclass(frozen=True)
class Mesh:
    """The section ``mesh``: how the processes that ``torchrun`` starts divide the work. It may be left out."""

    dp: int | None = None
    """Parts of a batch. Default: all processes / ``cp``."""
    cp: int = 1
    """Parts of a sample, each of consecutive tokens."""
    shard: bool = False
    """Whether parameters, gradients and optimizer states are sharded over all ranks by FSDP2. Without it, each has all."""
    param_dtype: str | None = None
    """The dtype in which sharded parameters are gathered: ``float32`` or ``bfloat16``. Default: as they are stored, float32."""
    reduce_dtype: str | None = None
    """The dtype of gradients while ranks sum them, likewise."""
    reshard_after_forward: bool = True
    """Whether the gathered parameters of a layer are freed after its forward pass, and gathered again for the backward pass."""
    cpu_offload: bool = False
    """Whether sharded parameters, gradients and optimizer states are in the memory of the host."""


@dataclass(frozen=True)
class Settings:
    """The whole file."""

    model: Mapping[str, Any]
    """Either ``path``, a checkpoint; or ``architecture`` and the arguments of that function of ``penstock.models``."""
    data: Data
    training: Training
    mesh: Mesh = Mesh()


ARCHITECTURES: dict[str, Callable[..., models.Config]] = {
    name: value
    for name, value in vars(models).items()
    if inspect.isfunction(value) and name in models.__all__ and "num_layers" in inspect.signature(value).parameters
}
"""Functions that make a configuration, by name."""


def read(file: Path) -> Settings:
    """Read and check a YAML file. Raises RangeError or DtypeError with every wrong key and value."""
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra.of(FUNCTION, "pyyaml", "transformers") from error
    complaints, text = Complaints(FUNCTION), read_text(file, FUNCTION, "config")
    try:
        content = yaml.safe_load(text)
        _check_keys(complaints, yaml.compose(text, yaml.SafeLoader))
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: an invalid date or number
        complaints.add(RangeError, "config", "a YAML file", f"{str(file)!r} ({error})")
    complaints.raise_any()
    return parse(content)


def _check_keys(complaints: Complaints, node: Any) -> None:
    """Check that no mapping of a YAML document has a key twice, because only the last one would count."""
    pairs = getattr(node, "value", None)
    seen = set()
    for key, value in pairs if isinstance(pairs, list) and getattr(node, "id", "") == "mapping" else ():
        if key.value in seen:
            complaints.add(
                RangeError, "config", "a YAML file with every key once", f"{key.value!r} again in line {key.start_mark.line + 1}"
            )
        seen.add(str(key.value))
        _check_keys(complaints, value)


def parse(content: Any) -> Settings:
    """Check what a YAML file contains.

    >>> parse({"model": {"path": "a.pth"}, "data": {"train": "a.txt"}, "training": {"output": "run", "lerning_rate": 1}})
    Traceback (most recent call last):
    penstock.errors.RangeError: train: training must be made of ..., got 'lerning_rate'. Did you mean learning_rate?
    """
    complaints = Complaints(FUNCTION)
    whole = _known(complaints, "the file", content, ("model", "data", "training", "mesh"))
    for section in ("model", "data", "training"):
        if section not in whole and isinstance(content, Mapping):
            complaints.add(RangeError, section, "given", "none", "Add this section.")
    data = _filled(complaints, "data", whole.get("data", {}), Data)
    training = _filled(complaints, "training", whole.get("training", {}), Training)
    mesh = _filled(complaints, "mesh", whole.get("mesh", {}), Mesh)
    if "model" in whole:
        _check_model(complaints, whole["model"])
    if data is not None:
        _check_data(complaints, data)
    if training is not None:
        _check_training(complaints, training)
    if mesh is not None:
        _check_mesh(complaints, mesh)
    complaints.raise_any()
    assert data is not None
    assert training is not None
    assert mesh is not None
    return Settings(whole["model"], data, training, mesh)


def _known(complaints: Complaints, place: str, content: Any, known: tuple[str, ...]) -> dict[str, Any]:
    """The entries of a mapping with known keys; adds a complaint for each other key."""
    if not isinstance(content, Mapping):
        complaints.add(DtypeError, place, f"a mapping of {', '.join(sorted(known))}", described(content))
        return {}
    for key in content:
        if key not in known:
            complaints.add(RangeError, place, f"made of {', '.join(sorted(known))}", repr(key), suggestion(str(key), known))
    return {key: value for key, value in content.items() if key in known}


def _filled(complaints: Complaints, place: str, content: Any, kind: type[Any]) -> Any:
    """A dataclass from a mapping; None, with complaints, if it does not fit."""
    before = len(complaints.found)
    given = _known(complaints, place, content, tuple(one.name for one in fields(kind)))
    hints, values = get_type_hints(kind), {}
    for one in fields(kind):
        name = f"{place}.{one.name}"
        if one.name in given:
            values[one.name] = _converted(complaints, name, given[one.name], hints[one.name])
        elif one.default is MISSING and isinstance(content, Mapping):
            complaints.add(RangeError, name, "given", "none", "Add this key.")
    return None if len(complaints.found) > before else kind(**values)


def _converted(complaints: Complaints, name: str, value: Any, wanted: Any) -> Any:
    """A value of the wanted type. Whole numbers are also floats, and one value is also a list of one."""
    kinds = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    texts = [text for one in kinds if get_origin(one) is Literal for text in get_args(one)]
    if value in texts or (value is None and type(None) in kinds):
        return value
    kind = kinds[0]
    if get_origin(kind) is tuple:
        element = get_args(kind)[0]
        return tuple(_converted(complaints, name, one, element) for one in (value if isinstance(value, list) else [value]))
    if kind is float and isinstance(value, str):  # YAML reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            pass
    right = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        rule = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[kind]
        complaints.add(DtypeError, name, " or ".join([rule, *texts]), described(value))
        return None
    try:
        return float(value) if kind is float else value
    except OverflowError:
        return float("inf")  # refused later, where it matters


def _check_model(complaints: Complaints, content: Any) -> None:
    if isinstance(content, Mapping) and "path" in content:
        _known(complaints, "model with a path", content, ("path",))
        if not isinstance(content["path"], str):
            complaints.add(DtypeError, "model.path", "a text", described(content["path"]))
        return
    architecture = content.get("architecture") if isinstance(content, Mapping) else None
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        rule = f"one of {', '.join(sorted(ARCHITECTURES))}"
        complaints.add(RangeError, "model.architecture", rule, described(architecture), "Or give the path of a checkpoint as model.path.")
        return
    parameters = inspect.signature(ARCHITECTURES[architecture]).parameters
    _known(complaints, f"model of architecture {architecture}", content, ("architecture", *parameters))
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name != "vocab_size" and name not in content:
            complaints.add(RangeError, f"model.{name}", "given", "none", "Add this key.")


def _check_data(complaints: Complaints, data: Data) -> None:
    _at_least(complaints, "data.length", data.length, 1)
    if not data.train:
        complaints.add(RangeError, "data.train", "at least one file", "none")
    if data.separator == "":
        complaints.add(RangeError, "data.separator", "a text of at least one character", "''")


def _check_training(complaints: Complaints, training: Training) -> None:
    for name in ("batch_size", "accumulate", "save_every", "keep", "evaluate_every", "evaluation_samples", "log_every", "steps"):
        value = getattr(training, name)
        if value is not None:
            _at_least(complaints, f"training.{name}", value, 1)
    if not training.output:
        complaints.add(RangeError, "training.output", "the path of a folder", "''")
    if training.seed > MAX_SEED:
        complaints.add(RangeError, "training.seed", f"at most {MAX_SEED}", training.seed)
    for name in ("warmup", "weight_decay", "seed"):
        _at_least(complaints, f"training.{name}", getattr(training, name), 0)
    for name in ("epochs", "learning_rate", "clip"):
        value = getattr(training, name)
        if not 0 < value < float("inf"):
            complaints.add(RangeError, f"training.{name}", "a finite number above 0", value)
    if len(training.betas) != 2 or not all(0 <= beta < 1 for beta in training.betas):
        complaints.add(RangeError, "training.betas", "two numbers from 0 to below 1", list(training.betas))
    for name, known in (("schedule", SCHEDULES), ("dtype", DTYPES), ("device", ("auto", "cpu", "cuda"))):
        if getattr(training, name) not in known:
            complaints.add(RangeError, f"training.{name}", f"one of {', '.join(known)}", repr(getattr(training, name)))


def _check_mesh(complaints: Complaints, mesh: Mesh) -> None:
    for name in ("dp", "cp"):
        value = getattr(mesh, name)
        if value is not None:
            _at_least(complaints, f"mesh.{name}", value, 1)
    for name in ("param_dtype", "reduce_dtype"):
        if getattr(mesh, name) not in (None, *DTYPES[1:]):
            complaints.add(RangeError, f"mesh.{name}", f"{' or '.join(DTYPES[1:])}", repr(getattr(mesh, name)))


def _at_least(complaints: Complaints, name: str, value: float, least: int) -> None:
    if not least <= value < float("inf"):
        complaints.add(RangeError, name, f"at least {least}", value)
    elif value >= 2**63:
        complaints.add(RangeError, name, "below 2^63", value)
