"""Files that trainers write in addition to a base model: tuned initial states and adapters. ``load`` puts them into the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...errors import Complaints, RangeError
from ...layers import RWKV6Config, RWKV7Config
from ..causal_lm import CausalLM, State
from ..config import Config
from .adapters import PART, TABLE, Change, Changed, LowRank, changes, options_of
from .archive import Archive, is_counter, is_safetensors
from .layout import Edits, Row
from .native import PENSTOCK
from .rwkv import BLINKDL

STATE = ".att.time_state"
"""The end of names of tuned initial states."""
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Beside:
    """The files of one call of ``load``."""

    state: PathLike | None = None
    adapter: PathLike | None = None
    alpha: float | None = None
    initial: PathLike | None = None

    def edit(self, config: Config, rows: list[Row]) -> tuple[Config, Edits]:
        """The configuration with these files, and the changes of the weights of a base model, whose file has ``rows``."""
        edits: dict[str, Callable[[Tensor | None], Tensor]] = {}
        if self.state is not None:
            config, found = _states(Archive(Path(self.state), "state"), config)
            edits |= found
        if self.adapter is not None:
            edits |= self._adapted(Archive(Path(self.adapter), "adapter"), config, rows)
        return config, edits

    def _adapted(self, archive: Archive, config: Config, rows: list[Row]) -> Edits:
        """The changes by an adapter."""
        found = self.changed(archive, config, rows)
        return {row.ours[0]: partial(_through, row=row, change=change) for row, change in found}

    def changed(self, archive: Archive, config: Config, rows: list[Row]) -> list[tuple[Row, Changed]]:
        """The targets of an adapter, whose names may be those of the file, of our parameters, or of BlinkDL's files."""
        initial = None if self.initial is None else _of_blocks(Archive(Path(self.initial), "adapter_init"))
        options = options_of(archive, self.alpha, initial)
        with torch.device("meta"):
            ours = CausalLM(config).state_dict()
        layouts = [rows, PENSTOCK.rows(config, None), *([] if BLINKDL.refuses(config) else [BLINKDL.rows(config, None)])]
        best: tuple[int, dict[str, Tensor], dict[str, Row]] = 0, {}, {}
        for prefix in archive.prefixes(half=True):
            tensors = {name: x for name, x in archive.below(prefix).tensors.items() if not is_counter(x)}
            for layout in layouts:
                known = {row.theirs[0]: row for row in layout if len(row.ours) == len(row.theirs) == 1}
                if (count := sum(_target(name) in known for name in tensors)) > best[0]:
                    best = count, tensors, known
        count, tensors, known = best
        if count:
            _refuse_tied(
                config,
                [
                    name
                    for name in tensors
                    if TABLE in name and _target(name) in known and known[_target(name)].ours[0] == "embeddings.weight"
                ],
            )
            shapes = {name: row.write(ours[row.ours[0]])[0].shape for name, row in known.items()}
            return [(known[name], change) for name, change in changes(tensors, shapes, options).items()]
        complaints = Complaints("load")
        value = f"{str(archive.path)!r} with {', '.join(sorted(archive.tensors)[:5]) or 'no tensors'}"
        complaints.add(RangeError, "adapter", "one for this base model", value)
        complaints.raise_any()
        raise AssertionError


def _refuse_tied(config: Config, names: list[str]) -> None:
    """Raise for these parts of an adapter of the embeddings if they are the head, too, which the adapter does not change."""
    if config.tie_embeddings and names:
        complaints, rule = Complaints("load"), "one of other weights than the embeddings, which are the weight of the head, too"
        complaints.add(RangeError, "adapter", rule, ", ".join(names), "Use it in PEFT.")
        complaints.raise_any()


def tuned_state(path: PathLike, config: Config) -> State:
    """The tuned initial states of a file as the state of one sequence of a model of this configuration. Raises as ``load``."""
    config, edits = _states(Archive(Path(path), "state"), config)
    with torch.device("meta"):
        model = CausalLM(config)
    model.load_state_dict({name: edit(None) for name, edit in edits.items()}, strict=False, assign=True)
    return model._initial_state(1, model.like(torch.device("cpu")))


def factors(path: PathLike, config: Config, rows: list[Row], alpha: float | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """A LoRA that is not merged: of each weight W [out,in] of ours, ``down`` [r,in] and ``up`` [out,r] of W + up down, float32.

    ``rows`` are those of the base model's file. Raises as ``load``, and RangeError for an adapter that changes something else.
    """
    archive, complaints = Archive(Path(path), "adapter"), Complaints("load")
    found = {}
    for row, changed in Beside(alpha=alpha).changed(archive, config, rows):
        name = row.ours[0]
        if isinstance(changed.change, LowRank) and changed.replaced is None and row.same:
            found[name] = changed.change.factors()
        else:
            remedy = "Merge it: penstock convert --adapter."
            complaints.add(
                RangeError, "adapter", "a LoRA of linear maps, to be chosen by requests", f"a change of {name} of another kind", remedy
            )
    complaints.raise_any()
    return found


def _target(name: str) -> str:
    match = PART.fullmatch(name)
    return f"{match[1]}.weight" if match else name


def _through(x: Tensor | None, *, row: Row, change: Change) -> Tensor:
    """A change in the layout of a row."""
    assert x is not None
    return row.read(change(row.write(x)[0]))[0].reshape(x.shape)


def _of_blocks(archive: Archive) -> Mapping[str, Tensor]:
    """The tensors of a file with names that begin with "blocks.", without prefixes of trainers and counters."""
    prefix = next((one for one in archive.prefixes() if any(name.startswith(f"{one}blocks.") for name in archive.tensors)), "")
    return {name: x for name, x in archive.below(prefix).tensors.items() if not is_counter(x)}


def _states(archive: Archive, config: Config) -> tuple[Config, Edits]:
    """The configuration with tuned initial states, and the states, which BlinkDL's layout has V x K."""
    complaints = Complaints("load")
    kinds = ", ".join(dict.fromkeys(one.kind for one in config.mixers))
    if BLINKDL.refuses(config) or not isinstance(config.mixer, RWKV6Config | RWKV7Config):
        complaints.add(
            RangeError, "state", f"None for a base model of {kinds}", repr(str(archive.path)), "RWKV-6 and RWKV-7 have tuned states."
        )
    if is_safetensors(archive.path):
        remedy = "Programs that write safetensors swap its axes or do not, and it does not tell."
        complaints.add(RangeError, "state", "a file of torch, as RWKV-PEFT writes it", repr(str(archive.path)), remedy)
    complaints.raise_any()
    assert isinstance(config.mixer, RWKV6Config | RWKV7Config)
    config = replace(config, mixer=replace(config.mixer, tuned_state=True))
    rows = [row for row in BLINKDL.rows(config, None) if row.theirs[0].endswith(STATE)]
    tensors = _of_blocks(archive)
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in CausalLM(config).state_dict().items()}
    for row in rows:
        (name,), shape = row.theirs, list(shapes[row.ours[0]])
        found = tensors.get(name)
        if found is None or list(found.shape) != shape:
            value = "none" if found is None else list(found.shape)
            complaints.add(RangeError, "state", f"a file with {name} of shape {shape}", value, "It belongs to another model.")
    for name in sorted(tensors.keys() - {row.theirs[0] for row in rows}):
        complaints.add(RangeError, "state", "a file of tuned initial states of this model alone", name)
    complaints.raise_any()
    return config, {row.ours[0]: partial(lambda x, row: row.read(tensors[row.theirs[0]])[0], row=row) for row in rows}


def refuse_alone(archive: Archive) -> None:
    """Raise RangeError for a file that must be loaded together with a base model."""
    complaints, value = Complaints("load"), repr(str(archive.path))
    names: Iterable[str] = archive.tensors
    if archive.tensors and all(name.endswith(STATE) for name in names):
        remedy = "Pass the base model as path, and this file as state."
        complaints.add(RangeError, "path", "a checkpoint with all weights", f"{value} with tuned initial states alone", remedy)
    elif any(".base_layer." in name for name in names):
        remedy = "Save what merge_and_unload() of PEFT returns."
        complaints.add(RangeError, "path", "a checkpoint of a model", f"{value} with a model and an adapter of PEFT", remedy)
    elif part := next((match for match in map(PART.fullmatch, names) if match), None):
        remedy = "Pass the base model as path, and this as adapter." if not part[2].startswith("init_") else "It belongs to adapter_init."
        complaints.add(RangeError, "path", "a checkpoint of a model", f"{value} with an adapter ({part[0]})", remedy)
    complaints.raise_any()
