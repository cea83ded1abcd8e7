"""States outside the pool: cached, saved to files, and used to continue sequences."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import Complaints, MissingExtra, RangeError, ShapeError, shortened
from ..files import usual_mode
from ..models import CausalLM
from .request import CHUNK
from .state_pool import StatePool

FORMAT = "penstock-state-1"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
"""Their names in safetensors files."""


@dataclass(frozen=True, eq=False)
class SequenceState:
    """The state of a sequence after its tokens: an aligned state, and the tokens after it, which are processed again to continue."""

    tokens: tuple[int, ...]
    aligned: int
    """The number of tokens in the aligned state: a multiple of 64, at most ``len(tokens)``."""
    row: Tensor
    """[W], an aligned row."""
    model: str
    """``fingerprint`` of the model."""
    pages: Tensor | None = None
    """[n,W], of a model with softmax attention: the pages of the aligned state, on the host."""


def fingerprint(model: CausalLM) -> str:
    """SHA-256 of the configuration and all weights."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, x in model.state_dict().items():
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        values = x.detach().cpu().contiguous()
        digest.update(_content(values))
    return digest.hexdigest()


def _content(x: Tensor) -> Any:
    """The bytes of a contiguous tensor on the CPU, in place, without NumPy."""
    return (ctypes.c_char * x.nbytes).from_address(x.data_ptr()) if x.nbytes else b""


def save_state(state: SequenceState, path: str | Path, model: CausalLM, pool: StatePool, notes: Mapping[str, str]) -> None:
    """Write a safetensors file: the tensors of the aligned row by their names, the tokens, and the model's fingerprint."""
    tensors = {name: x.cpu().contiguous() for name, x in _tensors(pool, state.row, state.pages).items()}
    tensors["tokens"] = torch.tensor(state.tokens, dtype=torch.int64)
    about = {**notes, **_about(model, pool, state.model), "tokens": str(len(state.tokens)), "aligned": str(state.aligned)}
    _write(Path(path), tensors, about)
    usual_mode(Path(path))


def _write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """A safetensors file. The package's own writer keeps 6 KB for each size that a tensor ever had, so for each number of tokens."""
    head: dict[str, Any] = {"__metadata__": about}
    parts, end = list[Any](), 0
    for name, x in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):  # so all of them are aligned
        begin, end = end, end + x.nbytes
        head[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
        parts.append(_content(x))
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.writelines([len(text).to_bytes(8, "little"), text, *parts])


def load_state(path: str | Path, model: CausalLM, pool: StatePool, model_hashes: Iterable[str]) -> SequenceState:
    """Read a file of ``save_state``. Raises RangeError or ShapeError unless it has this model, layout and dtype, and is whole and finite.

    ``model_hashes`` are the fingerprint of the model, then those of its tunings.
    """
    safe_open = _safetensors("load_state")
    complaints = Complaints("load_state")
    try:
        with safe_open(str(path), "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # the package raises its own kinds for broken files
        complaints.add(RangeError, "path", "a file that save_state wrote", f"{str(path)!r} ({error})")
        complaints.raise_any()
    remedy = "A state continues with the model that made it only."
    model_hash = next((one for one in model_hashes if one == about.get("model")), next(iter(model_hashes)))
    for name, wanted in _about(model, pool, model_hash).items():
        if about.get(name) != wanted:
            complaints.add(RangeError, f"the {name} of the file", shortened(wanted), shortened(about.get(name)), remedy)
    tokens = tensors.pop("tokens", torch.zeros(0, dtype=torch.int64))
    if tokens.dtype != torch.int64 or tokens.dim() != 1:
        complaints.add(ShapeError, "the tokens of the file", "torch.int64 with one axis", f"{tokens.dtype} {list(tokens.shape)}")
        complaints.raise_any()
    if about.get("tokens") != str(len(tokens)):
        complaints.add(RangeError, "the tokens of the file", f"{about.get('tokens')} of them", len(tokens))
    wrong = tokens[(tokens < 0) | (tokens >= model.config.vocab_size)]
    if len(wrong):
        complaints.add(RangeError, "the tokens of the file", f"from 0 to {model.config.vocab_size - 1}", int(wrong[0]))
    if about.get("aligned") not in [str(length) for length in range(0, len(tokens) + 1, CHUNK)]:
        rule = f"a multiple of {CHUNK}, at most its {len(tokens)} tokens"
        complaints.add(RangeError, "the aligned length of the file", rule, shortened(about.get("aligned")))
    complaints.raise_any()
    row, pages = pool.memory.new_zeros(pool.memory.shape[1]), None
    if pool.pages is not None:
        pages = torch.zeros(pool.pages.kept(int(about["aligned"])), pool.pages.memory.shape[1], dtype=torch.int64)
    wanted_tensors = _tensors(pool, row, pages)
    for name, x in wanted_tensors.items():
        found = tensors.get(name)
        if found is None or found.shape != x.shape or found.dtype != x.dtype:
            got = "none" if found is None else f"{found.dtype} {list(found.shape)}"
            complaints.add(ShapeError, name, f"{x.dtype} {list(x.shape)}", got, remedy)
        elif found.is_floating_point() and not found.isfinite().all():
            complaints.add(RangeError, name, "finite numbers", "NaN or inf among them", "Save it again from the engine that made it.")
        else:
            x.copy_(found)
    unknown = tensors.keys() - wanted_tensors.keys()
    if unknown:
        complaints.add(ShapeError, "the tensors of the file", "those of the state alone", shortened(sorted(unknown)), remedy)
    complaints.raise_any()
    return SequenceState(tuple(tokens.tolist()), int(about["aligned"]), row, model_hash, pages)


def _tensors(pool: StatePool, row: Tensor, pages: Tensor | None) -> dict[str, Tensor]:
    """The tensors of a state by their names, with the keys and values of its pages."""
    found = pool.tensors(row)
    if pool.pages is not None and pages is not None:
        found |= pool.pages.tensors(pages)
    return found


def _about(model: CausalLM, pool: StatePool, model_hash: str) -> dict[str, str]:
    dtypes = sorted({str(dtype).removeprefix("torch.") for _, dtype, _, _ in pool.layout})
    kinds = [mixer.kind for mixer in model.config.mixers]
    return {
        "format": FORMAT,
        "architecture": ",".join(dict.fromkeys(kinds)),
        "layout": ";".join(f"{name}{list(shape)}" for name, _, shape, _ in pool.layout),
        "dtype": ",".join(dtypes),
        "model": model_hash,
    }


def _safetensors(function: str) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise MissingExtra.of(function, "safetensors", "models") from error
    return safe_open
