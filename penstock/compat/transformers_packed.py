"""Packed sequences in the models that ``accelerate`` reaches: their offsets, and the convolution before the recurrence.

transformers describes packed sequences, one after another in one row, by ``cu_seq_lens_q`` (``cu_seqlens`` where a layer passes it on) or
by ``seq_idx``. Convolution and recurrence both keep them apart.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

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
