"""Checkpoints: ``load`` by path alone, and ``save`` in each format that supports the architecture. One file per format."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from ...call.declaration import FLOATS
from ...errors import Complaints, DeviceError, DtypeError, RangeError, ShapeError, described
from ...layers.quantization import Kind
from ...layers.registry import is_registered
from ...layers.sizes import check_number, check_whole
from ..causal_lm import CausalLM, State
from ..quantizing import check_kind, quantized_kinds
from .archive import Archive
from .beside import Beside, PathLike, factors, refuse_alone, tuned_state
from .fla import FLA
from .gguf import GGUF
from .layout import Format, built, read, sizes_of, tensors_of, weights_of
from .mamba2 import MAMBA2
from .native import PENSTOCK
from .rwkv import BLINKDL, HF_RWKV
from .writing import NOT_WRITTEN, SHARD, write_file, write_folder, writing

FORMATS = (PENSTOCK, BLINKDL, HF_RWKV, MAMBA2, FLA, GGUF)
NAMES = tuple(dict.fromkeys(one.name for one in FORMATS if one is not GGUF))
"""The names of formats in ``save``. "hf" depends on the architecture."""

__all__ = ["FORMATS", "NAMES", "load", "load_adapter", "load_headless", "load_tuned_state", "recognised", "save"]


def load(
    path: PathLike, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None, state: PathLike | None = None,
    adapter: PathLike | None = None, adapter_alpha: float | None = None, adapter_init: PathLike | None = None,
    quantize: Kind | None = None,
) -> CausalLM:  # fmt: skip
    """Load a model; the format and the sizes are read from the files.

    path : str or Path
        A file (.pth, .bin, .safetensors, .st, .gguf, or the index of several), or a folder as on a model hub or of
        ``torch.distributed.checkpoint``. Formats: BlinkDL's RWKV files (5.0, 5.1, 5.2, 6, 7), the Hugging Face layouts of RWKV-5, RWKV-6
        and Mamba-2, state-spaces' Mamba-2, fla's GLA, RetNet, DeltaNet, gated DeltaNet, KDA, RWKV-6 and RWKV-7, llama.cpp's RWKV-6 and
        RWKV-7, and Penstock's own.
    dtype : torch.dtype, optional
        float32, bfloat16, float16 or float64. Default: as stored; where a public file mixes dtypes, that of most weights.
    device : torch.device or str, optional
        Default: the CPU, where weights stay mapped from the files, so that there is no second copy of them.
    state : str or Path, optional
        A file of tuned initial states (``time_state``) for an RWKV-6 or RWKV-7, as RWKV-PEFT writes it.
    adapter : str or Path, optional
        An adapter for the model, which is merged into its weights: a file of RWKV-PEFT (LoRA, PiSSA, Bone, DiSHA), or a folder of PEFT
        (LoRA, MiSS).
    adapter_alpha : float, optional
        ``lora_alpha`` with which a LoRA of RWKV-PEFT was trained, because its files do not contain it.
    adapter_init : str or Path, optional
        ``init_pissa.pth`` of RWKV-PEFT. With it, the adapter is a PiSSA.
    quantize : "int8" or "int4", optional
        Large weights get 8 or 4 bits, each before the next one is read: see ``penstock.models.quantize``.

    Returns the model in evaluation mode. Code in files is never run. Raises RangeError, ShapeError, DtypeError or InvalidArgument with
    all missing, unknown and misshapen tensors, and MissingExtra if a package is missing.

    >>> import tempfile
    >>> from penstock.models import CausalLM, rwkv6
    >>> model = CausalLM(rwkv6(vocab_size=11, num_layers=2, hidden_size=16, head_size=8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, f"{folder}/small.pth", "blinkdl")
    ...     again = load(f"{folder}/small.pth")
    >>> again.config == model.config
    True
    """
    complaints = Complaints("load")
    _check_path(complaints, path)
    if dtype is not None and dtype not in FLOATS:
        complaints.add(DtypeError, "dtype", "float16, bfloat16, float32, float64 or None", described(dtype))
    if device is not None:
        _check_device(complaints, device)
    for argument, value in (("state", state), ("adapter", adapter), ("adapter_init", adapter_init)):
        if value is not None:
            _check_path(complaints, value, argument)
    if adapter_alpha is not None:
        check_number(complaints, "adapter_alpha", adapter_alpha)
    if quantize is not None:
        check_kind(complaints, "quantize", quantize)
    if adapter is None and (adapter_alpha is not None or adapter_init is not None):
        complaints.add(RangeError, "adapter", "given with adapter_alpha or adapter_init", "None")
    complaints.raise_any()
    archive, form = recognised(Archive(Path(path)))
    beside = Beside(state, adapter, adapter_alpha, adapter_init)
    edit = None if beside == Beside() else beside.edit
    return read(archive, form, dtype, None if device is None else torch.device(device), edit, quantize=quantize)


def load_adapter(path: PathLike, base: PathLike, *, adapter_alpha: float | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Read a LoRA without merging it, for ``Engine(adapters=...)``, where each request may choose one.

    path : str or Path
        As ``adapter`` of ``load``.
    base : str or Path
        The checkpoint of the base model.
    adapter_alpha : float, optional
        As for ``load``.

    Returns, for each weight W [out,in] that it changes, ``down`` [r,in] and ``up`` [out,r], float32: the weight becomes W + up down. Raises
    as ``load``, and RangeError for an adapter that changes anything but linear maps.
    """
    complaints = Complaints("load_adapter")
    _check_path(complaints, path)
    _check_path(complaints, base, "base")
    if adapter_alpha is not None:
        check_number(complaints, "adapter_alpha", adapter_alpha)
    complaints.raise_any()
    archive, form = recognised(Archive(Path(base)))
    config, _ = built(archive, form)
    return factors(path, config, form.rows(config, archive), adapter_alpha)


def load_tuned_state(path: PathLike, base: PathLike) -> State:
    """Read a file of tuned initial states (``time_state``) as the state of one sequence, for ``Engine(states=...)``.

    path : str or Path
        As ``state`` of ``load``.
    base : str or Path
        The checkpoint of the base model.

    Raises as ``load``.
    """
    complaints = Complaints("load_tuned_state")
    _check_path(complaints, path)
    _check_path(complaints, base, "base")
    complaints.raise_any()
    archive, form = recognised(Archive(Path(base)))
    return tuned_state(path, built(archive, form)[0])


def load_headless(path: PathLike, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> CausalLM:
    """Load a model that may have been saved without its head, as transformers' base models are; the head is then on the meta device."""
    archive, form = recognised(Archive(Path(path)))
    return read(archive, form, dtype, device, head=False)


def _check_weights(complaints: Complaints, model: CausalLM) -> None:
    """Check that a model has only the weights of its configuration: others would be lost, or ``load`` could not read them."""
    with torch.device("meta"):
        wanted = CausalLM(model.config).state_dict()
    found = weights_of(model)
    for name in [*wanted, *(one for one in found if one not in wanted)]:
        if name not in found:
            complaints.add(RangeError, "model", f"one with {name}", "none", "Set it.")
        elif name not in wanted:
            complaints.add(RangeError, "model", "one with the weights of its configuration alone", name, "Save or remove it first.")
        elif found[name].shape != wanted[name].shape:
            rule = f"one whose {name} is of shape {list(wanted[name].shape)}"
            complaints.add(ShapeError, "model", rule, list(found[name].shape), "Set its configuration, too.")
        elif found[name].dtype not in FLOATS:
            complaints.add(DtypeError, "model", f"one whose {name} has floating point numbers", found[name].dtype, "Convert it first.")


def _check_path(complaints: Complaints, path: object, argument: str = "path") -> None:
    """Check that a path is not empty. An empty one would be the current folder."""
    if not isinstance(path, str | os.PathLike):
        complaints.add(DtypeError, argument, "a str or a Path", described(path))
    elif not isinstance(name := os.fspath(path), str) or not name or "\0" in name:
        complaints.add(RangeError, argument, "the name of a file or folder", repr(name))


def _check_device(complaints: Complaints, device: object) -> None:
    """Check that torch can use a device."""
    if not isinstance(device, str | torch.device):
        complaints.add(DtypeError, "device", "a torch.device, its name or None", described(device))
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        complaints.add(DeviceError, "device", "one that torch can use", f"{str(device)!r} ({reason})")


def recognised(archive: Archive) -> tuple[Archive, Format]:
    """The format of a checkpoint, and the archive with the names of that format; raises RangeError for any other format."""
    if archive.config.get("model_type") != "penstock":  # users' mixers may have any names
        refuse_alone(archive)
    for prefix in archive.prefixes():
        found = archive.below(prefix) if prefix else archive
        for form in FORMATS:
            if form.recognises(found):
                return found, form
    if archive.config.get("model_type") == "penstock":
        return archive, PENSTOCK
    complaints = Complaints("load")
    names = ", ".join(sorted(archive.tensors)[:5]) or "no tensors"
    known = "; ".join(one.title for one in FORMATS)
    complaints.add(RangeError, "path", "a checkpoint of a known format", f"{str(archive.path)!r} with {names}", f"Known are {known}.")
    complaints.raise_any()
    raise AssertionError


def save(
    model: CausalLM, path: str | os.PathLike[str], format: str = "penstock", *, overwrite: bool = False, shard_bytes: int = SHARD
) -> None:
    """Save a model so that ``load``, and the project of the format, can read it.

    model : CausalLM
        On any device with memory. It or its layers may be compiled, or wrapped by activation checkpointing.
    path : str or Path
        A folder, which may exist and have other files; for "blinkdl" a file, of safetensors if its name ends with .safetensors.
    format : str
        "penstock" for every model; "blinkdl" for RWKV; "hf" for RWKV-5.2, RWKV-6 and Mamba-2; "fla" for GLA, RetNet, DeltaNet, gated
        DeltaNet, KDA, RWKV-6 and RWKV-7.
    overwrite : bool
        Whether files of an earlier model may be replaced.
    shard_bytes : int
        The largest size of a file of weights in a folder; tensors are not split.

    Weights keep their dtypes and bits. A file gets its name only when it is complete. Raises RangeError if the format does not support the
    model, naming those that do, or if there are such files already; OSError if files cannot be written.
    """
    complaints = Complaints("save")
    model = getattr(model, "_orig_mod", model)  # torch.compile(model)
    if not isinstance(model, CausalLM):
        complaints.add(DtypeError, "model", "a CausalLM", described(model))
    elif any(x.is_meta for x in model.state_dict().values()):
        complaints.add(DeviceError, "model", "on a device with memory", "weights on meta", "Load or initialise it first.")
    elif any(hasattr(x, "device_mesh") for x in model.state_dict().values()):
        remedy = "Gather them by torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True."
        complaints.add(DeviceError, "model", "one with whole weights", "weights sharded over several ranks", remedy)
    elif kinds := quantized_kinds(model):
        value = f"weights of {', '.join(kinds)}"
        complaints.add(RangeError, "model", "one with unquantized weights", value, "Save the model from which it was made.")
    else:
        _check_weights(complaints, model)
        for mixer in dict.fromkeys(one for one in (*model.config.mixers, *model.config.channels) if one is not None):
            if not is_registered(mixer):
                value, remedy = (
                    f"{type(mixer).__name__} of kind {mixer.kind!r}",
                    f"Call penstock.layers.register({type(mixer).__name__}).",
                )
                complaints.add(RangeError, "model", "one of registered mixers, which load can build again", value, remedy)
    _check_path(complaints, path)
    check_whole(complaints, "shard_bytes", shard_bytes, 1)
    if not isinstance(overwrite, bool):
        complaints.add(DtypeError, "overwrite", "a bool", described(overwrite))
    complaints.raise_any()
    config = sizes_of(model)
    reasons = {form: form.refuses(config) for form in FORMATS}
    possible = [form for form in FORMATS if form.name == format and reasons[form] is None]
    if not possible:
        why = "; ".join(f"{form.title}: {reasons[form]}" for form in FORMATS if form.name == format)
        rule = f"one of {', '.join(form.name for form in FORMATS if reasons[form] is None)} for this model"
        complaints.add(RangeError, "format", rule, f"{format!r}{f' ({why})' * bool(why)}")
    if possible and possible[0].stored is None and Path(path).suffix.lower() in (".st", *NOT_WRITTEN):
        rule = "the name of a file of torch or of safetensors, such as model.pth"
        complaints.add(RangeError, "path", rule, repr(str(path)), "Name another file.")
    complaints.raise_any()
    form, tensors = possible[0], tensors_of(model, config, possible[0])
    with writing(Path(path)):
        if form.stored is None:
            write_file(Path(path), tensors, overwrite)
            return
        dtypes = {x.dtype for x in tensors.values()}
        stored = form.stored(config)
        if len(dtypes) == 1:
            stored["dtype"] = str(dtypes.pop()).removeprefix("torch.")
        write_folder(Path(path), tensors, stored, overwrite, shard_bytes)
