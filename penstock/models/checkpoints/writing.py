"""Writing: files get their names only when they are complete."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import Complaints, MissingExtra, PenstockError, RangeError
from ...files import usual_mode
from .archive import SUFFIXES

SHARD = 5 * 2**30
"""The most bytes of a file of weights in a folder, as in transformers."""
CONFIG = "config.json"
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
"""Names of files of weights in folders, ours and those of public models."""
NOT_WRITTEN = (".gguf", ".ggml", ".json", ".onnx", ".msgpack", ".h5")
"""Ends of names of files that no format writes."""
FLAG = "replace it with overwrite=True"
"""The argument of ``save`` that allows overwriting."""
FULL = "The disk may be full."
PARENT = "Its parent folder cannot be made: name another place."
RIGHTS = "This user may not write there: name another place, or change its mode."
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), FULL),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EEXIST), PARENT),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), RIGHTS),
}
"""The remedy for an error of the system. torch's writer does not say which error it was."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise OSError, with the path, for files that cannot be written, as on a full disk. After any error, no new folders are left."""
    missing: list[Path] = []
    try:
        missing += [one for one in (path, *path.parents) if not one.exists()]
        yield
    except BaseException as error:
        for one in missing:
            with suppress(OSError):  # it is not a folder, or not empty
                one.rmdir()
        if isinstance(error, PenstockError) or not isinstance(error, OSError | RuntimeError):  # torch raises RuntimeError
            raise
        described = error.strerror if isinstance(error, OSError) and error.strerror else str(error).strip()
        reason = (described or type(error).__name__).splitlines()[0]
        told = re.search(r"os error ([0-9]{1,4})", reason)  # safetensors
        number = int(told[1]) if told else error.errno if isinstance(error, OSError) else None
        remedy = FULL if number is None else REMEDIES.get(number, "Name another place.")
        text = f"save: path must be a place that can be written, got {str(path)!r} ({reason}). {remedy}"
        raise OSError(text) from error


def check_file(complaints: Complaints, argument: str, path: Path, overwrite: bool, flag: str = FLAG) -> None:
    """Check that a file can be written; ``flag`` is the option that allows overwriting."""
    special = path.exists() and not path.is_file()
    if special or (os.path.lexists(path) and not overwrite):
        remedy = "Name a file." if special else f"Name another one, or {flag}."
        complaints.add(RangeError, argument, "a file that does not exist", repr(str(path)), remedy)


def check_folder(complaints: Complaints, argument: str, path: Path, overwrite: bool, flag: str = FLAG) -> list[Path]:
    """Check that a model can be written to a folder; return the files of an earlier one."""
    if path.exists() and not path.is_dir():
        complaints.add(RangeError, argument, "a folder", f"{str(path)!r}, which is a file", "Name another one.")
        return []
    if path.suffix.lower() in (*SUFFIXES, *NOT_WRITTEN) and not path.exists():
        remedy = f"Take {str(path.with_suffix(''))!r}. Of the formats, only blinkdl is one file."
        complaints.add(RangeError, argument, "a folder", f"{str(path)!r}, a name of a file", remedy)
    entries = sorted(path.iterdir()) if path.is_dir() else []
    present = [one for one in entries if one.name == CONFIG or WEIGHTS.fullmatch(one.name)]
    value = f"{str(path)!r} with {', '.join(one.name for one in present)}"
    if any(one.is_dir() for one in present):
        complaints.add(RangeError, argument, "a folder with files of these names only", value, "Name another one.")
    elif present and not overwrite:
        complaints.add(RangeError, argument, "a folder without a model", value, f"Name another one, or {flag}.")
    return present


def write_file(path: Path, tensors: Mapping[str, Tensor], overwrite: bool) -> None:
    """Write one file, by its name of safetensors or of torch. Raises RangeError if there is one already."""
    complaints, write = Complaints("save"), _safetensors_writer() if path.suffix == ".safetensors" else torch.save
    check_file(complaints, "path", path, overwrite)
    complaints.raise_any()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        write(_apart(tensors, tensors), Path(scratch) / path.name)
        os.replace(Path(scratch) / path.name, path)


def write_folder(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], overwrite: bool, shard: int = SHARD) -> None:
    """Write config.json and the weights as safetensors, in files of at most ``shard`` bytes. Other files of the folder stay.

    Raises RangeError if the folder has such files already.
    """
    write, complaints = _safetensors_writer(), Complaints("save")
    present = check_folder(complaints, "path", path, overwrite)
    complaints.raise_any()
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=path) as scratch:  # the parent may be of another file system
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        old.mkdir()
        files = dict(_files(tensors, shard))
        for name, inside in files.items():
            write(_apart(tensors, inside), new / name)
        if len(files) > 1:
            placed = {one: name for name, inside in files.items() for one in inside}
            total = sum(x.numel() * x.element_size() for x in tensors.values())
            _write_json(new / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": placed})
        _write_json(new / CONFIG, config)
        written = sorted(new.iterdir(), key=lambda one: (one.name == CONFIG, one.name))
        _move([*((one, old / one.name) for one in present), *((one, path / one.name) for one in written)])


def _safetensors_writer() -> Callable[[dict[str, Tensor], Path], None]:
    """A function that writes a file of safetensors."""
    try:
        import numpy  # noqa: F401  # safetensors needs it to write
        import safetensors.torch
    except ImportError as error:
        raise MissingExtra.of("save", "safetensors and numpy", "models") from error

    def write(tensors: dict[str, Tensor], path: Path) -> None:
        try:
            safetensors.torch.save_file(tensors, path, {"format": "pt"})
        except safetensors.SafetensorError as error:
            raise OSError(str(error)) from error
        usual_mode(path)

    return write


def _move(pairs: Iterable[tuple[Path, Path]]) -> None:
    """Rename all files, or none if one cannot be renamed."""
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in pairs:
            os.replace(source, target)
            done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            os.replace(target, source)
        raise


def copy_beside(source: Path, target: Path, names: Iterable[str], overwrite: bool) -> list[str]:
    """Copy those files that the source folder has, all or none; returns their names. Files of the target folder stay unless overwritten."""
    found = [name for name in names if (source / name).is_file() and (overwrite or not os.path.lexists(target / name))]
    with writing(target), tempfile.TemporaryDirectory(prefix=".", dir=target) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        old.mkdir()
        for name in found:
            for folder in (new, old, target):
                (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, new / name)
        present = [name for name in found if (target / name).is_file()]
        _move([*((target / name, old / name) for name in present), *((new / name, target / name) for name in found)])
    return found


def _files(tensors: Mapping[str, Tensor], shard: int) -> Iterable[tuple[str, list[str]]]:
    """Names of files and the tensors in each."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, x in tensors.items():
        count = x.numel() * x.element_size()
        if groups[-1] and size + count > shard:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += count
    if len(groups) == 1:
        return [("model.safetensors", groups[0])]
    return [(f"model-{n:05}-of-{len(groups):05}.safetensors", names) for n, names in enumerate(groups, 1)]


def _apart(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors on the CPU, each with memory of its own and of its size: torch would write all of the memory that a view is part of."""
    found: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name in names:
        x = tensors[name].detach().to("cpu").contiguous()
        whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
        found[name] = x if whole and x.data_ptr() not in addresses else x.clone()
        addresses.add(x.data_ptr())
    return found


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(_with_infinities(content), indent=2) + "\n", encoding="utf-8")


def _with_infinities(value: Any) -> Any:
    """JSON has no infinity; transformers writes it as an object."""
    if isinstance(value, dict):
        return {name: _with_infinities(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_infinities(one) for one in value]
    return {"__float__": "Infinity"} if value == float("inf") else value
