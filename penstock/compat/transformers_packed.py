"""Packed sequences in the models that ``accelerate`` reaches: their offsets, and the convolution before the recurrence.

transformers describes packed sequences, one after another in one row, by ``cu_seq_lens_q`` (``cu_seqlens`` where a layer passes it on) or
by ``seq_idx``. Convolution and recurrence both keep them apart. ``position_ids`` that begin again describe packed sequences, too, but
recurrent layers do not get them, and some models do not pass the others on: ``Watch`` knows what a model was given, and such layers raise.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Complaints, RangeError, ShapeError
from ..layers.convolution import short_convolution
from ..layers.sequences import Sequences

NAMES = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def offsets(function: str, batch: int, tokens: int, others: dict[str, Any], *, cached: bool = False) -> Tensor | None:
    """Offsets [N+1] of the sequences in one row, by the arguments of a layer; None if each row is one.

    ``cached``: there is a cache. It has one state for a row, and attention layers of transformers then attend to all tokens of the row.
    """
    given = {name: x for name in NAMES if (x := others.get(name)) is not None}
    if not given:
        check_alone(function)
        return None
    if "cu_seq_lens_k" in given and "cu_seqlens" in given:  # some layers pass cu_seq_lens_q on by this name
        given.setdefault("cu_seq_lens_q", given.pop("cu_seqlens"))
    complaints = Complaints(function)
    name = next(one for one in NAMES if one in given)
    if batch != 1:
        complaints.add(ShapeError, name, "None unless the batch has one row", f"{batch} rows", "Concatenate the sequences in one row.")
    if cached:
        complaints.add(RangeError, name, "None with a cache", "packed sequences", "Pass use_cache=False.")
    complaints.raise_any()
    from ..models.huggingface import packing

    return packing.offsets(function, batch, tokens, None, **given)


_local = threading.local()


class Watch:
    """Hooks of a model and its parts that take tokens: during a call, which of its arguments describes packed sequences.

    The outermost call counts. Positions are read, which waits for a GPU once a call, unless other arguments describe the sequences.
    Nothing is known while a call is compiled or captured, or computed again for gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        parts = [one for one in model.modules() if one is model or "input_ids" in inspect.signature(one.forward).parameters]
        self._hooks = [one.register_forward_pre_hook(_begin, prepend=True, with_kwargs=True) for one in parts]
        self._hooks += [one.register_forward_hook(_end, always_call=True) for one in parts]

    def remove(self) -> None:
        """Remove the hooks."""
        for one in self._hooks:
            one.remove()


def _calls() -> list[str | None]:
    """For each running call of a watched module in this thread, the argument of the outermost one that describes packed sequences."""
    found: list[str | None] = _local.__dict__.setdefault("calls", [])
    return found


def _begin(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        calls = _calls()
        calls.append(calls[-1] if calls else None)
        if len(calls) == 1:
            calls[0] = _described_by(module, arguments, named)


def _end(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    if not torch.compiler.is_compiling():
        _calls().pop()


def _described_by(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> str | None:
    """The argument that describes packed sequences."""
    names = [one.name for one in inspect.signature(module.forward).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    given = {**dict(zip(names, arguments)), **named}
    if (name := next((one for one in NAMES if given.get(one) is not None), None)) is not None:
        return name
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if isinstance(positions, Tensor) and positions.dim() == 3 and len(positions) == 4:
        positions = positions[0]  # of texts; the others are of images
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return None
    if positions.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < positions.shape[1]:
            return None  # it says which tokens are seen, and not what is padding
        mask = mask[:, mask.shape[1] - positions.shape[1] :] != 0
        positions = positions.expand(len(mask), -1)
    from ..models.huggingface.packing import steps

    return "position_ids" if bool((steps(positions, mask) <= 0).any()) else None


def check_alone(function: str) -> None:
    """Raise RangeError where a model was given packed sequences, and this layer was not told where they begin."""
    name = next(iter(_calls()), None)
    if name is None:
        return
    complaints = Complaints(function)
    if name == "position_ids":
        rule = "those of one sequence a row without cu_seq_lens_q or seq_idx, because recurrent layers do not get them"
        remedy = "Pass cu_seq_lens_q or seq_idx, too: DataCollatorWithFlattening(return_seq_idx=True)."
        complaints.add(RangeError, name, rule, "packed sequences", remedy)
    else:
        rule = "None, because the model does not pass it on to its recurrent layers"
        complaints.add(RangeError, name, rule, "packed sequences", "Call the model inside of it, as model.backbone, or take one row each.")
    complaints.raise_any()


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
) -> Tensor:
    """Hidden states [B,C,T], the weight [C,W]."""
    x = hidden_states.transpose(1, 2).to(weight.dtype)
    sequences = Sequences(x, offsets("causal_conv1d_fn", x.shape[0], x.shape[1], others))
    silu = activation in ("silu", "swish")
    state = x.new_zeros(sequences.count, weight.shape[1] - 1, x.shape[2])
    y, _ = short_convolution(x, state, weight, bias, sequences, silu=silu)
    if activation is not None and not silu:
        from transformers.activations import ACT2FN

        y = ACT2FN[activation](y)
    return y.to(hidden_states.dtype).transpose(1, 2)
