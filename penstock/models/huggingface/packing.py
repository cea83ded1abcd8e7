"""The sequences of a batch by transformers' arguments: padding, and packed sequences, one after another in one row.

A mask leaves padding out. ``cu_seqlens``, ``cu_seq_lens_q``, ``seq_idx`` and ``position_ids`` that restart are four ways to describe packed
sequences. All are converted to the offsets that ``Backbone`` takes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...call.declaration import INDICES
from ...call.validation import reads_values
from ...errors import Complaints, RangeError, ShapeError, described
from ...tokens.packing import offsets as ends_at
from .logits_to_keep import columns


class Tokens(NamedTuple):
    """Tokens as ``Backbone`` takes them: in rows [B,T], or packed [1,S] without padding."""

    ids: Tensor | None
    embedded: Tensor | None
    """[...,C]: embeddings, if there are no ids."""
    cu_seqlens: Tensor | None
    """int64 or int32 [N+1]"""
    keep: Tensor | None
    """bool [B,T]: False for padding, if there is any."""
    shape: tuple[int, int]
    """B and T"""

    def in_rows(self, x: Tensor) -> Tensor:
        """Hidden states in the places of their tokens, [B,T,C]. Padding gets those of the last token before it, or 0."""
        if self.keep is not None:
            return columns(x, self.keep, 0)
        return x.view(*self.shape, x.shape[-1])


def packed(ids: Tensor | None, embedded: Tensor | None, keep: Tensor | None, cu_seqlens: Tensor | None) -> Tokens:
    """Tokens without their padding. ``cu_seqlens`` are offsets over the tokens of all rows, row after row."""
    given = ids if embedded is None else embedded
    assert given is not None
    B, T = given.shape[:2]
    parts: list[Tensor | None] = [one if one is None or keep is None else one[keep][None] for one in (ids, embedded)]
    if keep is not None:
        ends = torch.arange(B + 1, device=keep.device) * T if cu_seqlens is None else cu_seqlens.long()
        cu_seqlens = F.pad(keep.flatten().cumsum(0), (1, 0))[ends]
    elif cu_seqlens is not None and B != 1:
        parts = [None if one is None else one.flatten(0, 1)[None] for one in parts]
    return Tokens(parts[0], parts[1], cu_seqlens, keep, (B, T))


def kept(function: str, mask: Tensor | None, batch: int, tokens: int, cached: int = 0) -> Tensor | None:
    """Where there are tokens, bool [B,T]; None if nothing is padding. ``attention_mask`` may begin with the ``cached`` tokens before."""
    if mask is None:
        return None
    complaints = Complaints(function)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] not in (tokens, cached + tokens):
        found = list(mask.shape) if isinstance(mask, Tensor) else described(mask)
        rule = f"of shape {[batch, tokens]}" + f" or, with the tokens of the cache, {[batch, cached + tokens]}" * (cached > 0)
        remedy = "Masks of pairs of tokens have no meaning here."
        complaints.add(ShapeError, "attention_mask", rule, found, remedy)
        complaints.raise_any()
    mask = mask[:, mask.shape[1] - tokens :]
    if mask.numel() == 0 or torch.compiler.is_compiling():
        return None if mask.numel() == 0 else mask != 0
    least, most = (float(x) for x in torch.stack(mask.to(torch.float32 if mask.is_floating_point() else torch.int64).aminmax()).tolist())
    if least < 0 or most > 1:
        remedy = "Packed sequences are given by position_ids, seq_idx, cu_seq_lens_q or cu_seqlens."
        complaints.add(RangeError, "attention_mask", "0 for padding and 1 for tokens", least if least < 0 else most, remedy)
    elif most == 0:
        complaints.add(RangeError, "attention_mask", "1 for at least one token", "padding only")
    complaints.raise_any()
    return None if least == 1 else mask != 0


def offsets(
    function: str, batch: int, tokens: int, keep: Tensor | None, *, cu_seqlens: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, seq_idx: Tensor | None = None, position_ids: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Offsets of packed sequences over the tokens of all rows, row after row; None if each row is one sequence.

    Of several arguments the first counts; where values can be read without waiting for a device, all must say the same.
    """
    complaints, axis = Complaints(function), "T" if batch == 1 else "B T"
    whole, given = ends_at(axis), {"cu_seqlens": cu_seqlens, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
    for name, x in given.items():
        if x is not None and not (isinstance(x, Tensor) and x.dim() == 1 and x.dtype in INDICES and x.numel()):
            complaints.add(ShapeError, name, "an int32 or int64 tensor of shape [N+1]", _described(x))
        elif x is not None and reads_values(x) and (wrong := whole(x, {axis: batch * tokens}, {})) is not None:
            complaints.add(RangeError, name, *wrong)
    by_token = {"seq_idx": (seq_idx, _of_numbers), "position_ids": (position_ids, _of_positions)}
    for name, (x, _) in by_token.items():
        fits = isinstance(x, Tensor) and list(x.shape) in ([batch, tokens], [1, tokens]) and x.dtype in INDICES
        if x is not None and not fits:
            complaints.add(ShapeError, name, f"an int64 or int32 tensor of shape {[batch, tokens]}", _described(x))
    if cu_seq_lens_k is not None and cu_seq_lens_q is None:
        complaints.add(RangeError, "cu_seq_lens_k", "None without cu_seq_lens_q", "a tensor", "Pass both, or cu_seqlens.")
    complaints.raise_any()
    found = {name: x for name, x in given.items() if x is not None}
    for name, (x, offsets_of) in by_token.items():
        if x is not None and tokens > 1 and (not found or reads_values(x)):
            found[name] = offsets_of(complaints, x.expand(batch, tokens), keep)
    complaints.raise_any()
    if not found:
        return None
    first = next(iter(found))
    for name, x in found.items():
        if reads_values(x) and reads_values(found[first]) and not _same(found[first], x, keep):
            complaints.add(RangeError, name, f"of the same sequences as {first}", "other ones", "Pass one of them.")
    complaints.raise_any()
    rows = first in by_token and found[first].numel() == batch + 1
    return None if rows else found[first]


def check_alone(function: str, keep: Tensor | None, starts: Tensor | None) -> None:
    """Raise unless the tokens of a context have no padding and no packed sequences of their own."""
    complaints = Complaints(function)
    if keep is not None:
        complaints.add(
            RangeError, "attention_mask", "1 for all tokens with a context", "padding", "Pack sequences: the context takes cu_seqlens."
        )
    if starts is not None:
        rule, remedy = "those of one sequence a row with a context", "Give the context the offsets of the whole token axis."
        complaints.add(RangeError, "cu_seqlens, seq_idx and position_ids", rule, "packed sequences", remedy)
    complaints.raise_any()


def _described(x: object) -> object:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else described(x)


def _of_numbers(complaints: Complaints, x: Tensor, keep: Tensor | None) -> Tensor:
    """Offsets of ``seq_idx`` [B,T]: a sequence begins where the number changes."""
    return _begun(x[:, 1:] != x[:, :-1])


def _of_positions(complaints: Complaints, x: Tensor, keep: Tensor | None) -> Tensor:
    """Offsets of ``position_ids`` [B,T]: a sequence begins where a position is not 1 more than the previous one. Padding has none."""
    step = steps(x, keep)
    least, most = torch.stack(step.aminmax()).tolist()
    if most > 1:
        rule = "that of the token before plus 1, or begin again, within each row"
        complaints.add(RangeError, "position_ids", rule, f"one that is {most} further", "Positions are counted here; none is left out.")
    return _begun(step <= 0) if least <= 0 else torch.arange(len(x) + 1, device=x.device) * x.shape[1]


def steps(positions: Tensor, keep: Tensor | None) -> Tensor:
    """What each position of ``position_ids`` [B,T] but the first is further than the previous one: [B,T-1], 1 at padding."""
    x = positions.long()
    if keep is None:
        return x[:, 1:] - x[:, :-1]
    index = torch.arange(x.shape[1], device=x.device).where(keep, 0).cummax(1).values  # of the last token before that is not padding
    step = x[:, 1:] - x.gather(1, index)[:, :-1]
    return step.where(keep[:, 1:] & (keep.cumsum(1)[:, :-1] > 0), 1)


def _begun(new: Tensor) -> Tensor:
    """Offsets, from whether each token but the first of its row [B,T-1] begins a sequence."""
    begins = F.pad(new, (1, 0), value=True).flatten().nonzero()[:, 0]
    return F.pad(begins, (0, 1), value=new.shape[0] * (new.shape[1] + 1))


def _same(one: Tensor, other: Tensor, keep: Tensor | None) -> bool:
    """Whether offsets describe the same sequences; empty ones and padding are ignored."""
    if keep is not None:
        before = F.pad(keep.flatten().cumsum(0), (1, 0))
        if int(torch.stack([one.max(), other.max()]).max()) >= before.numel():
            return False
        one, other = before[one.long()], before[other.long()]
    return torch.equal(one.long().unique(), other.long().unique())
