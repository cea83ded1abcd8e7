"""Which forms of chains, kernels and implementations of operators a model runs, and why not others. ``penstock.explain`` calls it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..call.private import is_fake
from ..errors import Complaints, DeviceError, DtypeError, RangeError, described, shortened
from ..layers import Mixer, Sequences, triton
from ..layers.as_written import unwrapped
from ..layers.chains import Choice, Operation, recorded
from ..layers.keywords import checked_keywords
from ..layers.modes import in_graph
from ..layers.sizes import check_whole
from ..layers.values import example
from .backbone import UPDATE_LAYER, Backbone, Layer, LayerUpdate
from .causal_lm import CausalLM

Mode = Literal["training", "prompt", "decode"]
TOKENS = 128
"""The default number of tokens of a sequence."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True)
class ModelExplanation:
    """The choices of all calls of chains and operators of a model. ``print`` shows them layer by layer; equal layers are merged."""

    call: str
    """The model, the number of tokens, the mode, dtype and device."""
    choices: tuple[Choice | Operation, ...]
    """In the order of the calls."""

    @property
    def kernels(self) -> frozenset[str]:
        """The kernels of all chains; those of operators are in their explanations."""
        return frozenset(name for one in self.choices if isinstance(one, Choice) for name in one.kernels)

    @property
    def layers(self) -> tuple[tuple[str, tuple[Choice | Operation, ...]], ...]:
        """Consecutive layers with equal choices, and the parts of the model before and after them: name, and choices by local names."""
        parts = [(name, tuple(_local(one) for one in found)) for name, found in groupby(self.choices, lambda one: _layer(one.module))]
        merged = []
        for same, alike in groupby(parts, lambda part: (part[0] is None, part[1])):
            names = [name for name, _ in alike]
            first, last = names[0], names[-1]
            title = "model" if first is None else f"layer {first}" if first == last else f"layers {first} to {last}"
            merged.append((title, same[1]))
        return tuple(merged)

    def __str__(self) -> str:
        lines = [self.call]
        for title, choices in self.layers:
            lines.append(f"  {title}")
            for _, alike in groupby(choices, lambda one: one._replace(module="")):
                lines += [f"    {line}" for line in _lines(list(alike))]
        return "\n".join(lines)


def _layer(module: str) -> int | None:
    found = _LAYER.search(module)
    return None if found is None else int(found[1])


def _local(one: Choice | Operation) -> Choice | Operation:
    found = _LAYER.search(one.module)
    return one if found is None else one._replace(module=one.module[found.end() :])


def _lines(alike: Sequence[Choice | Operation]) -> Iterator[str]:
    """The lines of equal choices of one or more modules."""
    one, names = alike[0], ", ".join(dict.fromkeys(each.module for each in alike if each.module))
    place = names and f"{names}: "
    if isinstance(one, Operation):
        walk = one.explanation
        before = tuple(each for each in walk.verdicts if each.reason is not None or each.name == walk.chosen[each.mode])
        first, *others = str(replace(walk, verdicts=before)).split("\n")
        yield place + first
        yield from others
        return
    kernels = f" ({', '.join(one.kernels)})" if one.kernels else ""
    yield f"{place}{one.chain} runs {one.form}{kernels}"
    for why, forms in groupby(one.reasons, lambda reason: reason[1]):
        yield f"  {', '.join(form for form, _ in forms)}: {why}"


@checked_keywords
def explain(model: nn.Module, *, tokens: int | None = None, mode: Mode = "training") -> ModelExplanation:
    """Which form of each chain a model runs, and why not those before it; the same of its operators' implementations.

    The model runs once on its device: its tensors decide. Its parameters, gradients and the states of other calls do not change. Hooks run.

    model : nn.Module
        A ``CausalLM``, a mixer, a layer, one of the Hugging Face classes, or a wrapper of one of these.
    tokens : int, optional
        For "training" and "prompt" the tokens of the sequence, 128 by default. For "decode" the sequences, 1 by default.
    mode : "training", "prompt" or "decode"
        "training": with gradients; kernels include those of the backward pass, which does not run. "prompt": packed tokens update a pool
        in place. "decode": one token for each sequence updates its row of a pool in place; on a GPU as in the CUDA graph of an engine.

    Raises DtypeError, RangeError or DeviceError.
    """
    complaints, inner = Complaints("explain"), _inner(model)
    if inner is None:
        rule = "a CausalLM, a mixer or a layer, or a module with one inside"
        complaints.add(DtypeError, "model", rule, described(model) if not isinstance(model, nn.Module) else type(model).__name__)
    if not isinstance(mode, str):
        complaints.add(DtypeError, "mode", "'training', 'prompt' or 'decode'", described(mode))
    elif mode not in get_args(Mode):
        complaints.add(RangeError, "mode", "'training', 'prompt' or 'decode'", shortened(mode))
    if tokens is not None:
        check_whole(complaints, "tokens", tokens, 1)
    complaints.raise_any()
    assert inner is not None
    like = inner.like() if isinstance(inner, Backbone) else _like(inner)
    if is_fake(like):
        complaints.add(DeviceError, "model", "on a device with data", str(like.device), "Load or initialise its weights.")
        complaints.raise_any()
    T = tokens or (1 if mode == "decode" else TOKENS)
    graph = mode == "decode" and like.device.type in triton.DEVICES
    context, training = in_graph() if graph else nullcontext(), mode == "training"
    with torch.inference_mode(False), torch.set_grad_enabled(training), recorded(model) as found, context:
        _run(model, inner, like, T, mode)
    dtype = str(like.dtype).removeprefix("torch.")
    return ModelExplanation(f"{type(model).__name__}: {mode}, tokens={T}, {dtype} on {like.device}", tuple(found))


def _inner(model: Any) -> Backbone | Layer | Mixer | None:
    """The part of a module that is run."""
    if not isinstance(model, nn.Module):
        return None
    return unwrapped(model, Backbone) or unwrapped(model, Layer) or unwrapped(model, Mixer)  # type: ignore[type-abstract]


def _like(module: nn.Module) -> Tensor:
    """An empty tensor like the inputs of a layer or mixer."""
    weight = next((one for one in chain(module.parameters(), module.buffers()) if one.is_floating_point()), torch.empty(0))
    return torch.empty(0, dtype=weight.dtype, device=weight.device)


def _run(model: nn.Module, inner: Backbone | Layer | Mixer, like: Tensor, T: int, mode: Mode) -> None:
    """A pass over T tokens. All ids are 0, and inputs of layers ones."""
    shape = (T, 1) if mode == "decode" else (1, T)
    device, slots = like.device, torch.arange(T if mode == "decode" else 1, device=like.device)
    ends = torch.tensor([0, T], device=device) if mode == "prompt" else None
    if isinstance(inner, Backbone):
        ids = torch.zeros(shape, dtype=torch.int64, device=device)
        if mode != "training":
            state = inner.initial_state(len(slots), max_length=T)
            if isinstance(inner, CausalLM):
                inner.advance(ids, state, cu_seqlens=ends, slots=slots, last_only=True)
            else:
                inner._advance(ids, None, state, ends, slots, last_only=True)
        elif isinstance(inner, CausalLM):
            inner.loss(ids, ids)
        else:
            inner(ids) if model is inner else model(ids, labels=ids)
        return
    x = like.new_ones(*shape, inner.mixer.hidden_size if isinstance(inner, Layer) else inner.hidden_size)
    values = example(like, shape, inner.takes)
    if mode == "training":
        x.requires_grad_()
        inner(x, None, Sequences(x), values)
        return
    sequences = Sequences(x, ends, slots, in_place=True)
    pool: Any = inner.initial_state(len(slots), like, T)
    if isinstance(inner, Layer):
        UPDATE_LAYER(LayerUpdate(inner, x, None, pool, sequences, values or {}))
    else:
        inner.advance(x, pool, cu_seqlens=ends, slots=slots, values=values)
