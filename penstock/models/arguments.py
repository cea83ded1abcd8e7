"""Checks of the arguments of models: tokens, states and numbers. They run before anything is computed or written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..call.autocast import autocasting
from ..call.declaration import FLOATS, INDICES, Argument
from ..call.private import is_lazy_zero
from ..call.validation import check_tensor, overlaps, reach, reads_values
from ..errors import Complaints, DtypeError, RangeError, ShapeError, described, shortened
from ..layers.rwkv6 import State

MODEL = "the model"


def check_whole(complaints: Complaints, name: str, value: object, least: int) -> None:
    """Check a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        complaints.add(DtypeError, name, "a whole number", described(value))
    elif value < least:
        complaints.add(RangeError, name, f"a whole number of at least {least}", value)
    elif value >= 2**63:
        complaints.add(RangeError, name, "a whole number below 2^63", shortened(value))


def check_tokens(complaints: Complaints, tokens: Tensor, vocab_size: int, device: torch.device) -> None:
    """Check token indices [B,T] on the model's device; their values only if ``reads_values`` allows it, and not in compiled graphs."""
    found = len(complaints.found)
    if not isinstance(tokens, Tensor):
        complaints.add(DtypeError, "tokens", "a torch.Tensor", described(tokens), "Make one with torch.tensor([[...]]).")
        return
    remedy = "One sequence is tokens[None]."
    check_tensor(complaints, Argument("tokens", "B T", INDICES, hint=remedy), tokens, {}, device, MODEL)
    if len(complaints.found) > found or torch.compiler.is_compiling() or not reads_values(tokens) or tokens.numel() == 0:
        return
    least, most = (int(x) for x in tokens.aminmax())
    if least < 0 or most >= vocab_size:
        value = least if least < 0 else most
        complaints.add(RangeError, "tokens", f"from 0 to {vocab_size - 1}", value, "Use the tokenizer that belongs to the model.")


def check_state(complaints: Complaints, state: object, num_layers: int, sizes: dict[str, int], like: Tensor, written: bool) -> None:
    """Check one ``State`` for each layer: sizes, and device and dtype of ``like``. A state that is written must not overlap itself.

    Under autocast, norms compute in float32, so shift states may have any dtype.
    """
    if not isinstance(state, list | tuple) or not all(isinstance(one, State) for one in state):
        parts = {type(one).__name__ for one in state} if isinstance(state, list | tuple) else set()
        found = type(state).__name__ + f" of {', '.join(sorted(parts))}" * bool(parts)
        complaints.add(DtypeError, "state", "a list of State", found, "Pass the state that the model or its initial_state returned.")
        return
    if len(state) != num_layers:
        complaints.add(ShapeError, "state", f"one State for each of {num_layers} blocks", len(state))
        return
    shifts = FLOATS if autocasting(like.device.type) else (like.dtype,)
    remedy = f"initial_state({sizes['B']}) makes one for this batch."
    for n, one in enumerate(state):
        for field, axes, dtypes in (("time_shift", "B C", shifts), ("channel_shift", "B C", shifts), ("wkv", "B H K V", FLOATS)):
            name, x = f"state[{n}].{field}", getattr(one, field)
            if not isinstance(x, Tensor):
                complaints.add(DtypeError, name, "a torch.Tensor", described(x))
                continue
            check_tensor(complaints, Argument(name, axes, dtypes, hint=remedy), x, sizes, like.device, MODEL)
            if written:
                _check_writable(complaints, name, x)
        if complaints.found:
            return  # the states of other blocks are usually wrong in the same way
    if written and not torch.compiler.is_compiling():
        _check_apart(complaints, state)


def _check_apart(complaints: Complaints, state: Sequence[State]) -> None:
    """Check that no two tensors of a state share memory."""
    named = [(f"state[{n}].{field}", x) for n, one in enumerate(state) for field, x in one._asdict().items() if x.numel()]
    for (name, x), (other, y) in pairwise(sorted(named, key=lambda pair: pair[1].data_ptr())):
        if y.data_ptr() < x.data_ptr() + reach(x) and (x.is_contiguous() or x.data_ptr() == y.data_ptr()):
            complaints.add(RangeError, other, "in memory of its own, since it is written in place", f"memory of {name}", "Clone it first.")


def _check_writable(complaints: Complaints, name: str, x: Tensor) -> None:
    if not torch.compiler.is_compiling() and (x.is_neg() or x.is_conj() or is_lazy_zero(x)):
        complaints.add(
            RangeError,
            name,
            "memory that can be written",
            "a lazily negated or conjugated tensor, or zeros without memory",
            "Clone it first.",
        )
    if overlaps(x):
        value = f"strides {list(x.stride())} over shape {list(x.shape)}"
        complaints.add(RangeError, name, "free of overlap, because it is written in place", value, "Clone it first.")
    if not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled():
        rule = "made outside of torch.inference_mode() if it is written outside of it"
        complaints.add(RangeError, name, rule, "an inference tensor", "Clone it first.")
