"""Reading: the tensors of a checkpoint by name, mapped from its files and not copied."""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...call.declaration import FLOATS
from ...errors import Complaints, DtypeError, MissingExtra, RangeError, described, shortened
from . import distributed, gguf_file
from .foreign import Found, kind_of_content, kind_of_file, kind_of_folder, kind_of_objects, kind_of_shard
from .names import prefixes, unwrapped, weights_of, without
from .places import models_inside, refuse_missing, refuse_stand_in

ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
"""Files of adapters in folders of PEFT."""
STEMS = ("model.safetensors", "pytorch_model.bin")
"""Files of weights in folders, as the Hugging Face hub has them; in parts with NAME.index.json, which lists the part of each tensor."""
SUFFIXES = (".safetensors", ".st", ".bin", ".pth", ".pt", ".ckpt")
DAMAGED = "The file is damaged or of another model."
LONGEST = 500
"""The characters allowed in the name of a tensor."""
FOUND = "Use the path of a .pth, .bin or .safetensors file, or of a folder with config.json and such files."


class Archive:
    """The tensors of a checkpoint and its config.json, an empty dict if there is none; of a GGUF file its metadata.

    Tensors are memory-mapped, except those in parts of several ranks: bytes are read where they are used. Files are read by safetensors,
    or by torch with ``weights_only=True``: no code in a file is run. Names are those of the model, without the prefixes and wrappers of
    trainers.

    ``argument`` is the name in errors. Raises RangeError, DtypeError or MissingExtra.
    """

    def __init__(self, path: Path, argument: str = "path") -> None:
        self.path, self.argument = path, argument
        complaints = Complaints("load")
        try:
            self._read(complaints)
        except OSError as error:
            complaints.add(RangeError, argument, "a file or folder that can be read", f"{str(path)!r} ({error.strerror or error})")
            complaints.raise_any()

    def _read(self, complaints: Complaints) -> None:
        path, argument = self.path, self.argument
        refuse_missing("load", argument, path)
        if not path.is_file() and not path.is_dir():
            value = f"{str(path)!r}{', which is neither' * path.exists()}"
            complaints.add(RangeError, argument, "an existing file or folder", value, FOUND)
            complaints.raise_any()
        self.folder = path if path.is_dir() else path.parent
        stored = path.is_dir() or path.name.startswith(tuple(name.partition(".")[0] for name in STEMS))
        self.config = read_json(complaints, self.folder / "config.json") if stored else {}
        self.tensors: dict[str, Tensor] = {}
        for file in _files(complaints, path, argument):
            if argument == "path" and gguf_file.is_gguf(file):
                tensors, self.config = gguf_file.read(file, argument)
            else:
                tensors = _read(complaints, file, argument)
            for name in tensors:
                if not isinstance(name, str):
                    complaints.add(DtypeError, argument, "a checkpoint whose tensors have texts as names", described(name))
                elif not 0 < len(name) <= LONGEST or not name.isprintable():
                    rule = f"a checkpoint whose tensors have printable names of at most {LONGEST} characters"
                    complaints.add(RangeError, argument, rule, f"{shortened(name)} in {file.name}", DAMAGED)
            complaints.raise_any()
            for name, x in tensors.items():
                if (one := unwrapped(name)) in self.tensors:
                    complaints.add(RangeError, argument, "a checkpoint with every tensor once", f"{one!r} again in {file.name}")
                self.tensors[one] = x
        for name, x in self.tensors.items():
            rule = "a tensor of floating point numbers"
            if not isinstance(x, Tensor):
                complaints.add(DtypeError, name, rule, described(x), "Pass a file that has the tensors of a model alone.")
            elif x.dtype not in FLOATS and not is_counter(x):
                remedy = "Quantised weights are not supported. Take it out of the file if it is no weight."
                complaints.add(DtypeError, name, rule, x.dtype, remedy)
            elif x.layout != torch.strided or x.is_meta or x.untyped_storage().nbytes() < x.numel() * x.element_size():
                value = "no values" if x.is_meta else "sparse values" if x.layout != torch.strided else f"fewer for shape {list(x.shape)}"
                complaints.add(RangeError, name, f"{rule} with all its values", value)
        complaints.raise_any()

    def prefixes(self, half: bool = False) -> list[str]:
        """Prefixes of the names of a model: modules of trainers that contain it. ``half``: see ``names.prefixes``."""
        return prefixes(self.tensors, half)

    def below(self, prefix: str) -> Archive:
        """The same archive with a prefix, or the longest part of it that they have, removed from names."""
        found, complaints, whole = copy(self), Complaints("load"), dict[str, str]()
        found.tensors = {}
        for name, x in self.tensors.items():
            one = without(name, prefix)
            if (other := whole.setdefault(one, name)) != name:
                complaints.add(
                    RangeError, self.argument, "a checkpoint with every tensor once", " and ".join(sorted((other, name), key=len))
                )
            found.tensors[one] = x
        complaints.raise_any()
        return found

    def depth(self, prefix: str) -> int:
        """The number of layers: 1 + the highest N of names ``prefix``N.more."""
        found = ((re.match("([0-9]{1,18})[.]", name.removeprefix(prefix)), name) for name in self.tensors if name.startswith(prefix))
        last, name = max(((int(number[1]), name) for number, name in found if number), default=(-1, ""))
        depth = last + 1
        if depth > len(self.tensors):
            complaints = Complaints("load")
            complaints.add(RangeError, name, f"a tensor of one of at most {len(self.tensors)} layers", f"layer {last}", DAMAGED)
            complaints.raise_any()
        return depth

    def shape(self, name: str, axes: str, layers: Iterable[int] | None = None) -> tuple[int, ...]:
        """The shape of a tensor whose axes are given as in "V C", with "..." for any others at the end.

        A name with {} stands for all ``layers``, of which one may be damaged: the most frequent shape counts. Raises RangeError if
        no tensor has this number of axes.
        """
        letters = axes.split()
        before, layered, after = name.partition("{}")
        layers = layers or range(max(self.depth(before), 1))
        names = [f"{before}{n}{after}" for n in layers] if layered else [name]
        found = [tuple(self.tensors[one].shape) for one in names if one in self.tensors and self.tensors[one].numel()]
        shapes = Counter(one for one in found if len(one) == len(letters) or (letters[-1] == "..." and len(one) >= len(letters) - 1))
        if not shapes:
            complaints = Complaints("load")
            one = names[0]
            value = list(self.tensors[one].shape) if one in self.tensors else "none"
            complaints.add(RangeError, one, f"a tensor of shape [{','.join(letters)}]", value, DAMAGED)
            complaints.raise_any()
        return shapes.most_common(1)[0][0]

    def has(self, name: str) -> bool:
        """Whether any layer, for {} in the name, has a tensor."""
        before, layered, after = name.partition("{}")
        return any(f"{before}{n}{after}" in self.tensors for n in range(self.depth(before))) if layered else name in self.tensors


def is_counter(x: Tensor) -> bool:
    """Whether a tensor is one whole number, such as a step counter, and not a weight."""
    return x.numel() == 1 and not x.dtype.is_floating_point and not x.dtype.is_complex


def _files(complaints: Complaints, path: Path, argument: str) -> list[Path]:
    """The files of weights of a checkpoint."""
    if path.name.endswith(".index.json"):
        return _parts(complaints, path, argument)
    if not path.is_dir():
        _refuse(complaints, argument, path, kind_of_shard(path))
        return [path]
    for name in ADAPTERS if argument == "adapter" else STEMS:
        if (path / name).is_file():
            return [path / name]
        if (path / f"{name}.index.json").is_file():
            return _parts(complaints, path / f"{name}.index.json", argument)
    entries = sorted(one for one in path.iterdir() if one.suffix in SUFFIXES)
    found = [one for one in entries if one.is_file()]
    if argument == "path" and (metadata := distributed.metadata_of(path)) is not None:
        return [metadata]
    if len(found) != 1:
        _refuse(complaints, argument, path, kind_of_folder(path))
        names = ", ".join(one.name for one in found) or ", ".join(f"{one.name}, which is not a file" for one in entries) or "none of these"
        remedy = models_inside(path) or FOUND
        complaints.add(RangeError, argument, f"a folder with {' or '.join(STEMS)} or one {' or '.join(SUFFIXES)} file", names, remedy)
        complaints.raise_any()
    return found


def _parts(complaints: Complaints, index: Path, argument: str) -> list[Path]:
    """The files that an index lists."""
    placed = read_json(complaints, index).get("weight_map")
    names = list({str(one): one for one in placed.values()}.values()) if isinstance(placed, dict) else []
    if not names:
        complaints.add(RangeError, index.name, "an index with a weight_map from tensors to files", described(placed))
    for name in names:
        if not isinstance(name, str) or not name.isprintable() or len(name) > 255 or Path(name).name != name or name in ("", ".."):
            complaints.add(RangeError, index.name, "an index of files beside it", described(name))
        elif not (index.parent / name).is_file():
            complaints.add(RangeError, argument, f"a checkpoint with all files of {index.name}", f"no {name}", "Download all files.")
    complaints.raise_any()
    return sorted(index.parent / name for name in names)


def is_safetensors(path: Path) -> bool:
    """Whether a file is one of safetensors, by its name or its header."""
    if path.suffix == ".safetensors":
        return True
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _read(complaints: Complaints, path: Path, argument: str) -> Mapping[str, Tensor]:
    """All tensors of a file, mapped."""
    refuse_stand_in("load", argument, path)
    if path.name == distributed.METADATA:
        return _read_parts(complaints, path, argument)
    _refuse(complaints, argument, path, kind_of_file(path))
    if is_safetensors(path):
        return _read_safetensors(complaints, path, argument)
    try:
        mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 cannot be mapped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the kind of pickle, before the error
            content: Any = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except Exception as error:  # damaged bytes can raise any error of the unpickler
        _refuse(complaints, argument, path, kind_of_objects(error))
        reason = "it is no file of torch, or has more than tensors in it"
        if isinstance(error, OSError | RuntimeError) and str(error).strip():  # other messages also advise to run code of the file
            reason = str(error).strip().splitlines()[0]
        value = f"{path.name!r}, which torch cannot read: {reason}"
        complaints.add(RangeError, argument, "a checkpoint", value, f"It may be cut off. {FOUND}")
        complaints.raise_any()
    if not isinstance(content, dict):
        complaints.add(RangeError, argument, "a checkpoint with a dict of tensors", f"{path.name!r} with {described(content)}", FOUND)
        complaints.raise_any()
    weights, *others = weights_of(content)
    if others:
        remedy = "Save one of them alone, such as torch.save(torch.load(FILE)['model'], NEW)."
        complaints.add(RangeError, argument, "a checkpoint of one model", f"{path.name!r} with {1 + len(others)} dicts of weights", remedy)
        complaints.raise_any()
    _refuse(complaints, argument, path, kind_of_content(weights))
    return weights


def _read_parts(complaints: Complaints, path: Path, argument: str) -> Mapping[str, Tensor]:
    try:
        return distributed.read(path)
    except Exception as error:  # damaged bytes can raise any error
        value = f"{str(path.parent)!r}, which torch.distributed.checkpoint cannot read: {shortened(str(error).partition(chr(10))[0])}"
        complaints.add(RangeError, argument, "a checkpoint", value, "It may be cut off.")
        complaints.raise_any()
        raise


def _refuse(complaints: Complaints, argument: str, path: Path, found: Found | None) -> None:
    """Raise RangeError for anything but a checkpoint."""
    if found is not None:
        complaints.add(RangeError, argument, "a checkpoint", f"{str(path)!r}, {found[0]}", found[1])
        complaints.raise_any()


def _read_safetensors(complaints: Complaints, path: Path, argument: str) -> Mapping[str, Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingExtra.of("load", "safetensors", "models") from error
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        value = f"{path.name!r}, which safetensors cannot read: {error}"
        complaints.add(RangeError, argument, "a checkpoint", value, "It may be cut off.")
        complaints.raise_any()
        raise


def read_json(complaints: Complaints, path: Path) -> dict[str, Any]:
    """A JSON file with one object; an empty dict if there is no file. transformers writes infinity as an object."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_hook=_with_infinities)
    except (ValueError, RecursionError) as error:
        complaints.add(RangeError, path.name, "a JSON file", str(error))
        complaints.raise_any()
        raise
    if not isinstance(found, dict):
        complaints.add(RangeError, path.name, "a JSON file with one object", described(found))
        complaints.raise_any()
    return dict(found)


def _with_infinities(value: dict[str, Any]) -> Any:
    name = value.get("__float__")
    return float(name) if len(value) == 1 and name in ("Infinity", "-Infinity", "NaN") else value
