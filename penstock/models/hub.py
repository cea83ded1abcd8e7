"""Arguments of transformers' ``from_pretrained``: dtypes, devices, and repositories of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import Complaints, DtypeError, RangeError, described


def dtype_of(complaints: Complaints, value: Any) -> torch.dtype | None:
    """``dtype``; None: as stored."""
    if value is None or value == "auto":
        return None
    found = getattr(torch, value, value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        complaints.add(DtypeError, "dtype", "a torch.dtype, its name or 'auto'", described(value))
        complaints.raise_any()
    assert isinstance(found, torch.dtype)
    return found


def device_of(complaints: Complaints, value: Any) -> torch.device | None:
    """``device_map``."""
    if value == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(value, dict) and list(value) == [""]:
        value = value[""]
    if value is not None and not isinstance(value, str | int | torch.device):
        complaints.add(RangeError, "device_map", "one device", described(value), "A model is on one device.")
        complaints.raise_any()
    try:
        return None if value is None else torch.device(value)
    except RuntimeError:
        complaints.add(RangeError, "device_map", "one device, 'auto' or None", described(value), "A model is on one device.")
        complaints.raise_any()
        raise


def downloaded(name: str, hub: dict[str, Any]) -> Path:
    """The folder of a repository of the hub, downloaded if needed."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.bin", "*.pth", "*.txt", "*.model"]
    return Path(snapshot_download(name, allow_patterns=patterns, **hub))
