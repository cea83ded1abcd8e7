"""A format as data: which tensors of a file are which parameters of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import Complaints, DtypeError, InvalidArgument, RangeError, ShapeError, described, shortened
from ...layers.quantization import Kind
from ..causal_lm import CausalLM
from ..config import Config
from ..quantizing import Quantizing
from .archive import DAMAGED, Archive, is_counter
from .names import unwrapped

Change = Callable[..., tuple[Tensor, ...]]


def _same(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


@dataclass(frozen=True)
class Row:
    """Parameters of a model and the tensors of a file that hold them, usually one of each."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    read: Change = _same
    """From their tensors to ours. Shapes that differ only in axes of size 1 are reshaped afterwards."""
    write: Change = _same
    """From our tensors to theirs: the exact inverse."""

    @property
    def same(self) -> bool:
        """Whether the tensors of a file are the parameters, under other names."""
        return self.read is _same


def same(ours: str, theirs: str) -> Row:
    """The same tensor under another name."""
    return Row((ours,), (theirs,))


def flat(ours: str, theirs: str) -> Row:
    """Stored with one axis."""
    return Row((ours,), (theirs,), write=lambda x: (x.reshape(-1),))


def transposed(ours: str, theirs: str) -> Row:
    """Stored with its two axes swapped."""
    return Row((ours,), (theirs,), lambda x: (x.T,), lambda x: (x.T,))


def renamed(rows: Iterable[Row], name: Callable[[str], str]) -> list[Row]:
    """The same rows with other names in the file."""
    return [Row(row.ours, tuple(name(one) for one in row.theirs), row.read, row.write) for row in rows]


@dataclass(frozen=True)
class Format:
    """A checkpoint format for some architectures."""

    name: str
    """The name in ``save`` and ``penstock convert``."""
    title: str
    """The name in messages."""
    recognises: Callable[[Archive], bool]
    """Whether a checkpoint has this format, by the names of its tensors."""
    config: Callable[[Archive], Config]
    """The sizes, read from shapes; from config.json only what shapes do not tell. Raises for what is not supported."""
    rows: Callable[[Config, Archive | None], list[Row]]
    """The tensors of a model of these sizes; the archive where layouts differ in details."""
    refuses: Callable[[Config], str | None]
    """Why this format does not support a model, or None."""
    stored: Callable[[Config], dict[str, Any]] | None
    """The content of config.json. None: the format is one file of torch."""
    ignored: tuple[str, ...] = ()
    """Endings of the names of tensors to ignore."""


HEAD = "head.weight"
TOLD = {
    "num_hidden_layers": "num_layers", "n_layer": "num_layers", "block_count": "num_layers",
    "hidden_size": "hidden_size", "d_model": "hidden_size", "embedding_length": "hidden_size",
}  # fmt: skip
"""Names of sizes in config.json and in metadata of GGUF files. Shapes tell them, too: a file without its last layers is damaged."""
Edits = Mapping[str, Callable[[Tensor | None], Tensor]]
"""By the name of a parameter: a function of the stored tensor, or of None, that runs before conversion."""


def read(
    archive: Archive, form: Format, dtype: torch.dtype | None, device: torch.device | None,
    edit: Callable[[Config, list[Row]], tuple[Config, Edits]] | None = None, head: bool = True, quantize: Kind | None = None,
) -> CausalLM:  # fmt: skip
    """The model of a checkpoint. Raises ShapeError or RangeError that lists every missing, unknown or misshapen tensor.

    ``edit`` changes the configuration of the checkpoint and its weights. Without ``head``, a missing head stays on the meta device. With
    ``quantize``, each weight is quantized before the next one is read.
    """
    config, model = built(archive, form)
    rows = form.rows(config, archive)
    if not head:
        rows = [row for row in rows if row.ours != (HEAD,) or row.theirs[0] in archive.tensors]
    check(archive, form, model, rows)
    edits: Edits = {}
    if edit is not None:
        config, edits = edit(config, rows)
        with torch.device("meta"):
            model = CausalLM(config)
    if dtype is None and form.name != "penstock":  # layers compute in one dtype: files may mix them
        dtype = model_dtype(archive.tensors[name] for row in rows for name in row.theirs)
    shapes = {name: x.shape for name, x in model.state_dict().items()}
    weights: dict[str, Tensor] = {}
    addresses: set[int] = set()
    quantizing = None if quantize is None else Quantizing(model, quantize)
    for row in rows:
        for name, stored in zip(row.ours, row.read(*(archive.tensors[one] for one in row.theirs))):
            x = stored.reshape(shapes[name])
            x = edits[name](x) if name in edits else x
            x = x.to(dtype=dtype or stored.dtype, device=device).contiguous()
            if quantizing is not None and name in quantizing.maps:
                weights |= quantizing(name, x)
                continue
            weights[name] = x.clone() if x.data_ptr() in addresses else x  # files of torch may store two as one
            addresses.add(x.data_ptr())
    for name in edits.keys() - weights.keys():
        weights[name] = edits[name](None).to(dtype=dtype or weights["embeddings.weight"].dtype, device=device).contiguous()
    if config.tie_embeddings:
        weights |= quantizing(HEAD, weights["embeddings.weight"]) if quantizing else {HEAD: weights["embeddings.weight"]}
    if quantizing is not None:
        model = quantizing.model
        quantizing.finish(weights["embeddings.weight"].dtype)
    model.load_state_dict(weights, assign=True, strict=head)
    model.tie()
    return model.eval()


def built(archive: Archive, form: Format) -> tuple[Config, CausalLM]:
    """The configuration of a checkpoint, and a model of it without memory. Raises for sizes that contradict each other."""
    complaints, rule = Complaints("load"), "a checkpoint of a model that can be built"
    try:
        config, architecture = form.config(archive), archive.config.get("general.architecture")
        for name, size in TOLD.items():  # names of metadata begin with the architecture
            key, place = (name, "in config.json") if architecture is None else (f"{architecture}.{name}", "of the file")
            if (value := archive.config.get(key)) not in (None, found := getattr(config, size)):
                complaints.add(RangeError, f"{key} {place}", f"{found}, as in the tensors", shortened(value), DAMAGED)
        complaints.raise_any()
        with torch.device("meta"):
            return config, CausalLM(config)
    except InvalidArgument as error:  # configurations and layers name their own arguments
        if str(error).startswith("load:"):
            raise
        complaints.add(type(error), "path", rule, f"{str(archive.path)!r} with {str(error).removesuffix('.')}")
    except (RuntimeError, TypeError, OverflowError) as error:  # torch cannot count the weights of layers of such sizes
        complaints.add(RangeError, "path", rule, f"{str(archive.path)!r} with other sizes: {str(error).splitlines()[0]}", DAMAGED)
    complaints.raise_any()
    raise AssertionError


def model_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype of most numbers."""
    sizes: dict[torch.dtype, int] = {}
    for x in tensors:
        sizes[x.dtype] = sizes.get(x.dtype, 0) + x.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def check(archive: Archive, form: Format, model: CausalLM, rows: list[Row]) -> None:
    """Raise for every tensor that is missing, unknown or misshapen."""
    complaints, ours = Complaints("load"), model.state_dict()
    known = set()
    for row in rows:
        for name, x in zip(row.theirs, row.write(*(ours[one] for one in row.ours))):
            known.add(name)
            rule = f"of shape {list(x.shape)}"
            if name not in archive.tensors:
                complaints.add(RangeError, name, f"a tensor {rule}", "none", DAMAGED)
            elif significant(archive.tensors[name]) != significant(x):
                complaints.add(ShapeError, name, rule, list(archive.tensors[name].shape))
            elif is_counter(archive.tensors[name]):
                complaints.add(DtypeError, name, "a tensor of floating point numbers", archive.tensors[name].dtype)
    for name in sorted(archive.tensors.keys() - known):
        if not name.endswith(form.ignored or ("\0",)) and not is_counter(archive.tensors[name]):
            value = f"a tensor of shape {list(archive.tensors[name].shape)}"
            complaints.add(RangeError, name, f"absent from {form.title}", value, DAMAGED)
    complaints.raise_any()


def significant(x: Tensor) -> list[int]:
    """The shape without axes of size 1."""
    return [size for size in x.shape if size != 1]


def weights_of(model: CausalLM) -> dict[str, Tensor]:
    """The tensors of a model under the names that they have without ``torch.compile`` and other modules around its layers."""
    return {unwrapped(name): x for name, x in model.state_dict().items()}


def sizes_of(model: CausalLM) -> Config:
    """The configuration of a model, without ``tie_embeddings`` if its head now differs, for example after merging an adapter."""
    if not model.config.tie_embeddings:
        return model.config
    ours = weights_of(model)
    one, other = ours["embeddings.weight"], ours[HEAD]
    same = one.data_ptr() == other.data_ptr() or torch.equal(one, other.to(one.device))
    return model.config if same else replace(model.config, tie_embeddings=False)


def tensors_of(model: CausalLM, config: Config, form: Format) -> Mapping[str, Tensor]:
    """The tensors of a model of this configuration under the names of a format."""
    ours = weights_of(model)
    rows = form.rows(config, None)
    return {name: x for row in rows for name, x in zip(row.theirs, row.write(*(ours[one] for one in row.ours)))}


def common(config: Config, norm: str, head: str, embeddings: str, embedding_norm: str = "") -> list[Row]:
    """Rows of the embeddings, norms outside of layers, and the head, unless it is that of the embeddings."""
    rows = [same("embeddings.weight", embeddings)]
    if config.embedding_norm:
        rows += norms(config, "embedding_norm", embedding_norm)
    rows += norms(config, "norm", norm)
    return rows if config.tie_embeddings else [*rows, same("head.weight", head)]


def norms(config: Config, ours: str, theirs: str) -> list[Row]:
    """Rows of one of the norms of hidden_size."""
    bias = config.norm == "layer_norm" and config.norm_bias
    return [same(f"{ours}.{part}", f"{theirs}.{part}") for part in ("weight", "bias")[: 1 + bias]]


def needed(archive: Archive, models: str) -> None:
    """Raise RangeError if there is no config.json."""
    if not archive.config:
        complaints = Complaints("load")
        rule = f"a checkpoint with its config.json, without which sizes of {models} are unknown"
        complaints.add(RangeError, "path", rule, f"no config.json in {str(archive.folder)!r}", "Put both into one folder and pass that.")
        complaints.raise_any()


def number(values: Mapping[str, Any], name: str, default: float | None, least: float | None = None) -> Any:
    """A number of config.json, not below ``least``; whole if ``least`` is. Raises RangeError if it is something else."""
    value = values.get(name)
    if value is None:
        return default
    kinds = int if isinstance(least, int) else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not (-(2**63) if least is None else least) <= value < 2**63:
        complaints = Complaints("load")
        rule = f"a{' whole' * isinstance(least, int)} number{'' if least is None else f' of at least {least}'}"
        complaints.add(RangeError, f"{name} in config.json", rule, described(value))
        complaints.raise_any()
    return value


def check_told(values: Mapping[str, Any], name: str, found: float, size: int = 1, of: str = "") -> None:
    """Raise RangeError if config.json has another value than shapes tell: ``found``, of which ``size`` times as much is a whole number.

    ``of`` says what the tensors are of.
    """
    told = number(values, name, None)
    if told is not None and abs(told - found) * size >= 1 and int(told * size) != round(found * size):  # fla rounds down
        complaints = Complaints("load")
        complaints.add(RangeError, f"{name} in config.json", f"{found:g}, as in the tensors{of}", told, DAMAGED)
        complaints.raise_any()


def flag(values: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean of config.json. Raises RangeError if it is something else."""
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        complaints = Complaints("load")
        complaints.add(RangeError, f"{name} in config.json", "true or false", described(value))
        complaints.raise_any()
    return default if value is None else value


def divided(size: int, parts: int, name: str) -> int:
    """Size / parts; raises RangeError, which names a tensor or value, if that is not whole."""
    if size < parts or size % parts:
        complaints = Complaints("load")
        complaints.add(RangeError, name, f"such that {size} is a multiple of it", parts, DAMAGED)
        complaints.raise_any()
    return size // parts


def tied(archive: Archive, configured: bool, embeddings: str, head: str) -> bool:
    """Whether the head is that of the embeddings: so configured, and no other one in the file."""
    if not configured or head not in archive.tensors or embeddings not in archive.tensors:
        return bool(configured)
    return torch.equal(archive.tensors[embeddings], archive.tensors[head])
