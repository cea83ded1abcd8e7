"""Reading of GGUF files, by the package gguf: tensors of the types F32, F16 and BF16, mapped, and of Q8_0, which become float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import Complaints, MissingExtra, RangeError, shortened

TYPES = ("F32", "F16", "BF16", "Q8_0")
FEWER = "Pass a file of these types, such as the F16 file that it was made from, or the original checkpoint."


def read(path: Path, argument: str) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """The tensors of a file, mapped unless they are quantised, and its numbers and texts by their keys."""
    try:
        import gguf
        import numpy
    except ImportError as error:
        raise MissingExtra.of("load", "gguf", "gguf") from error
    complaints = Complaints("load")
    try:
        reader = gguf.GGUFReader(path, "c")
        fields = {name: field.contents() for name, field in reader.fields.items() if len(field.types) == 1}
    except Exception as error:  # damaged bytes can raise any error
        value = f"{path.name!r}, which gguf cannot read: {shortened(str(error).partition(chr(10))[0])}"
        complaints.add(RangeError, argument, "a checkpoint", value, "It may be cut off.")
        complaints.raise_any()
        raise
    found: dict[str, Tensor] = {}
    for one in reader.tensors:
        kind = one.tensor_type.name
        if kind not in TYPES:
            complaints.add(RangeError, one.name, f"of type {', '.join(TYPES)}", kind, FEWER)
        elif kind == "Q8_0":
            found[one.name] = torch.from_numpy(gguf.dequantize(one.data, one.tensor_type))
        elif kind == "BF16":
            shape = [int(size) for size in reversed(one.shape.tolist())]
            found[one.name] = torch.from_numpy(one.data.view(numpy.int16)).view(torch.bfloat16).view(shape)
        else:
            found[one.name] = torch.from_numpy(one.data)
    complaints.raise_any()
    return found, fields


def is_gguf(path: Path) -> bool:
    """Whether a file is one of GGUF, by its first bytes."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
