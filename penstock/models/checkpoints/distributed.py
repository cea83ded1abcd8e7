"""Folders of ``torch.distributed.checkpoint``, to which each rank writes its part of sharded tensors.

Their metadata is a pickle. Only the classes that torch writes are allowed in it, so no code in a file is run.
"""

from __future__ import annotations

import pickle
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

METADATA = ".metadata"
"""The file that says which tensors there are; it is written last."""
ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *sorted(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}  # fmt: skip
"""Classes and functions by their modules."""
OTHERS = ("optimizer.", "optim.", "lr_scheduler.", "train_state.", "dataloader.")
"""Prefixes of what trainers keep beside a model."""


def metadata_of(folder: Path) -> Path | None:
    """The metadata of a folder or of the only folder in it with a model; None if there is none."""
    if (folder / METADATA).is_file():
        return folder / METADATA
    found = [one for one in sorted(folder.glob(f"*/{METADATA}")) if not one.parent.name.startswith("optim")]
    return found[0] if len(found) == 1 else None


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a model, from its metadata. Raises any error for damaged files."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    content = path.read_bytes()

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            found = _Unpickler(BytesIO(content)).load()
            if not isinstance(found, Metadata):
                raise pickle.UnpicklingError("it has no metadata")
            return found

    reader = Reader(path.parent)
    parts = reader.read_metadata().state_dict_metadata
    stored = {name: one for name, one in parts.items() if isinstance(one, TensorStorageMetadata) and not name.startswith(OTHERS)}
    size = sum(one.size.numel() * one.properties.dtype.itemsize for one in stored.values())
    if size > sum(one.stat().st_size for one in path.parent.iterdir()):
        raise ValueError("its files are too short")
    tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in stored.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # this process reads all parts
        try:
            load(dict(tensors), storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # no Exception
            raise ValueError("; ".join(str(one) for one, _ in error.failures.values())) from error
    return tensors


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")
        return super().find_class(module, name)
