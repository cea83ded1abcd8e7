"""Recognises files and folders that are not checkpoints, for the messages of ``load``, with remedies."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import shortened

Found = tuple[str, str]
"""A description that follows the name in a message, and the remedy."""

ORIGINAL = "Pass the checkpoint that it was made from."
UNPACK = "Unpack it, and pass what is in it."
ALONE = "Save the weights alone: torch.save(model.state_dict(), FILE)."
ZERO = "Make one file of it: python zero_to_fp32.py FOLDER OUTPUT, a program that DeepSpeed puts beside global_step folders."
UNFINISHED = "Pass a checkpoint that was written to its end."
BEGINNINGS: tuple[tuple[bytes, Found], ...] = (
    (b"GGUF", ("a GGUF file of llama.cpp", ORIGINAL)),
    (b"fmgg", ("a file of rwkv.cpp", ORIGINAL)),
    (b"lmgg", ("a GGML file", ORIGINAL)),
    (b"tjgg", ("a GGML file", ORIGINAL)),
    (b"\x89HDF\r\n", ("an HDF5 file, as of Keras", ORIGINAL)),
    (b"\x93NUMPY", ("an array of NumPy", ORIGINAL)),
    (b"\x1f\x8b", ("compressed by gzip", UNPACK)),
    (b"BZh", ("compressed by bzip2", UNPACK)),
    (b"\xfd7zXZ", ("compressed by xz", UNPACK)),
    (b"\x28\xb5\x2f\xfd", ("compressed by zstd", UNPACK)),
    (b"7z\xbc\xaf", ("a 7z archive", UNPACK)),
    (b"Rar!", ("a rar archive", UNPACK)),
)
SUFFIXES: dict[str, Found] = {
    ".onnx": ("a program of ONNX", ORIGINAL),
    ".msgpack": ("a file of Flax", ORIGINAL),
    ".json": ("a file of JSON, which has no weights", "Pass its folder, or the file of weights beside it."),
    ".py": ("a program", "Pass the file of weights beside it."),
}
SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(\.(?:safetensors|bin|pth|pt))")
"""Names of files of a checkpoint in parts."""


def kind_of_file(path: Path) -> Found | None:
    """The kind of a file, by its first bytes and its name; None if it may be a checkpoint."""
    with path.open("rb") as file:
        head = file.read(512)
    for beginning, found in BEGINNINGS:
        if head.startswith(beginning):
            return found
    if path.suffix in SUFFIXES and not path.name.endswith(".index.json"):
        return SUFFIXES[path.suffix]
    if head[257:262] == b"ustar":
        return "a tar archive", UNPACK
    return _kind_of_zip(path)


def _kind_of_zip(path: Path) -> Found | None:
    try:
        if not zipfile.is_zipfile(path):
            return None
        names = zipfile.ZipFile(path).namelist()
    except Exception:  # damaged bytes can raise any error
        return None
    if any(re.fullmatch(r"[^/]+/(data|constants)\.pkl", name) for name in names):
        script = any(re.match(r"[^/]+/code/", name) for name in names)
        return ("a program of TorchScript", ALONE) if script else None
    if names and all(name.endswith(".npy") for name in names):
        return "arrays of NumPy", ORIGINAL
    return f"a zip archive of {shortened(', '.join(sorted(names)[:3]) or 'nothing')}", UNPACK


def kind_of_shard(path: Path) -> Found | None:
    """The description of a file that is one part of a checkpoint; None for a whole checkpoint."""
    match = SHARD.fullmatch(path.name)
    if match is None or int(match[3]) < 2:
        return None
    index = path.with_name(f"{match[1]}{match[4]}.index.json")
    return f"one of {int(match[3])} files of a checkpoint", f"Pass its folder or {index.name}, which lists all."


def kind_of_folder(path: Path) -> Found | None:
    """The description of a folder without files of weights."""
    names = sorted(one.name for one in path.iterdir())
    if "adapter_config.json" in names:
        return "a folder with an adapter of PEFT", "Pass the base model as path, and this folder as adapter."
    if shards := sorted(one.parent.name for one in [*path.glob("*.distcp"), *path.glob("*/*.distcp")]):
        inner = "" if shards[0] == path.name else f" in {shards[0]}"
        return f"a folder of torch.distributed.checkpoint{inner} without a model's .metadata, which is written last", UNFINISHED
    if "zero_to_fp32.py" in names or any(re.search(r"_(model|optim)_states\.pt$", name) for name in names):
        return "a folder of DeepSpeed", ZERO
    if parts := [match for match in map(SHARD.fullmatch, names) if match]:
        one = parts[0]
        return f"a folder with {len(parts)} of {int(one[3])} files, and no {one[1]}{one[4]}.index.json", "Download all files."
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f"a folder with {ggufs[0]}", "Pass the file itself."
    others = [name for name in names if Path(name).suffix in (".ggml", ".onnx", ".msgpack", ".h5")]
    return (f"a folder with {others[0]}", ORIGINAL) if others else None


def kind_of_content(content: Mapping[Any, Any]) -> Found | None:
    """The description of a dict in a file of torch that has no weights, or only converted ones."""
    names = content.keys()
    if {"state", "param_groups"} <= names:
        return "the state of an optimizer, which has no weights", "Pass the file of the model beside it."
    if "optimizer_state_dict" in names and not any(isinstance(x, Tensor) for x in content.values()):
        return "the state of an optimizer, which has no weights", ZERO
    if {"last_epoch", "_last_lr"} <= names or {"scale", "growth_factor"} <= names:
        return "the state of a training, which has no weights", "Pass the file of the model beside it."
    if "_strategy" in names:
        return "converted by the package rwkv, which transposes and scales weights", ORIGINAL
    tensors = [x for x in content.values() if isinstance(x, Tensor)]
    if len(tensors) > 1 and all(x.numel() == 0 for x in tensors):
        return "weights without values, as of ZeRO stage 3", ZERO
    if any(isinstance(name, str) and name.rpartition(".")[2] in ("_flat_param", "flat_param") for name in names):
        return "weights that FSDP has flattened", "Save them with StateDictType.FULL_STATE_DICT."
    return None


def kind_of_objects(error: Exception) -> Found | None:
    """The description of a file of torch with more than tensors, from the unpickler's error. No code of the file is run."""
    match = re.search(r"\bGLOBAL ([\w.]{1,200}) was not an allowed", str(error))
    return None if match is None else (f"a file of torch with objects of Python ({match[1]})", f"They are not run. {ALONE}")
