"""Checks of the arguments of models: tokens, states and numbers. They run before anything is computed or written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.declaration import FLOATS, INDICES, Argument
from ..call.validation import check_tensor
from ..errors import Complaints, DtypeError, ShapeError, described
from ..layers.arguments import check_apart, check_part, check_sequences, named_tensors
from ..layers.values import check_range

__all__ = ["check_sequences", "check_state", "check_tokens", "marks", "named_tensors"]

MODEL = "the model"


def check_tokens(complaints: Complaints, ids: Any, vocab_size: int, device: torch.device) -> None:
    """Check token indices [B,T] on the model's device; their values only if ``reads_values`` allows it, and not in compiled graphs."""
    found = len(complaints.found)
    if not isinstance(ids, Tensor):
        complaints.add(DtypeError, "ids", "a torch.Tensor", described(ids), "Make one with torch.tensor([[...]]).")
        return
    if ids.layout != torch.strided:
        complaints.add(DtypeError, "ids", "a dense tensor", ids.layout, "Convert it with ids.to_dense().")
        return
    remedy = "One sequence is ids[None]."
    check_tensor(complaints, Argument("ids", "B T", INDICES, hint=remedy), ids, {}, device, MODEL)
    if len(complaints.found) == found:
        check_range(complaints, "ids", ids, vocab_size, "Use the tokenizer that belongs to the model.")


def check_labels(complaints: Complaints, labels: Any, ids: Any) -> None:
    """Check the shape and dtype of labels [B,T], unless ``ids`` are wrong, which another check says."""
    if isinstance(labels, Tensor) and isinstance(ids, Tensor) and ids.dim() == 2:
        sizes, remedy = dict(zip("BT", ids.shape)), "They are the next tokens: ids = tokens[:, :-1], labels = tokens[:, 1:]."
        check_tensor(complaints, Argument("labels", "B T", INDICES, hint=remedy), labels, sizes, labels.device, MODEL)


def check_embeddings(complaints: Complaints, x: Any, hidden_size: int, device: torch.device) -> None:
    """Check embeddings of tokens [B,T,hidden_size] on the model's device."""
    if not isinstance(x, Tensor):
        complaints.add(DtypeError, "inputs_embeds", "a torch.Tensor", described(x))
        return
    check_tensor(complaints, Argument("inputs_embeds", "B T C", FLOATS), x, {"C": hidden_size}, device, MODEL)


def marks(state: object, *others: object) -> tuple[object, ...] | None:
    """Everything that the check of a pool depends on: a pool with equal marks need not be checked again. None if they cannot be read.

    ``others`` are further values on which the check depends.
    """
    if torch.compiler.is_compiling() or not isinstance(state, list | tuple):
        return None
    found: list[object] = [torch.is_inference_mode_enabled(), len(state), *others]
    try:
        for one in state:
            for part in (one.mixer, one.channel):
                found.append(type(part))
                for x in _tensors(part):
                    found += (type(x), x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x.is_neg(), x.is_inference())
    except (AttributeError, TypeError, RuntimeError):  # not such a state: the check says what is wrong
        return None
    return tuple(found)


def _tensors(part: Any) -> Iterator[Any]:
    """The tensors of a state, which may have parts of its own."""
    for one in part:
        if isinstance(one, tuple):
            yield from _tensors(one)
        else:
            yield one


def check_state(complaints: Complaints, state: object, wanted: Sequence[Any], count: int | None, written: bool) -> None:
    """Check the states of all layers against ``wanted``, states of no sequences: types, sizes, dtypes and device.

    The first axis has ``count`` rows; None: any number, the same everywhere. A size of 0 in ``wanted`` matches any size (a cache may hold
    any number of tokens). Floating-point states may have any floating dtype. A state that is written must not overlap itself.
    """
    if not isinstance(state, list | tuple) or hasattr(state, "_fields"):
        remedy = "Pass the state that the model or its initial_state returned."
        complaints.add(DtypeError, "state", "a list of LayerState", described(state), remedy)
        return
    if len(state) != len(wanted):
        complaints.add(ShapeError, "state", f"one LayerState for each of {len(wanted)} layers", len(state))
        return
    sizes: dict[str, int] = {} if count is None else {"N": count}
    for n, (one, other) in enumerate(zip(state, wanted)):
        if other is None:  # the state of a module that is not a Layer
            continue
        check_part(complaints, f"state[{n}]", one, other, sizes, written, MODEL)
        if complaints.found:
            return  # the states of other layers are usually wrong in the same way
    if written and not torch.compiler.is_compiling():
        check_apart(complaints, state)
