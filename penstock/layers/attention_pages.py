"""Softmax attention whose keys and values are in pages, for updates in place: many sequences share one memory, and may share pages.

A page has ``PAGE`` consecutive tokens of a sequence. Row r of ``pages`` lists the pages of row r of the pool, in order. The caller gives
pages to rows before their tokens come; no token is written to a page of a row before its ``length``.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..softmax.triton import LARGEST, over_pages
from ..tokens.dtypes import state_dtype
from .chains import Chain, ChainForm, launches, plain
from .examples import Draw, examples
from .sequences import Sequences, drawn
from .triton import refusal

PAGE = 64
"""Tokens of a page. The engine cuts sequences only at multiples of it (``engine.request.CHUNK``), so that whole pages are shared."""


class PagedAttentionState(NamedTuple):
    """The state of a softmax attention layer in pages."""

    keys: Tensor
    """[P,PAGE,G,D], after the rotary embedding."""
    values: Tensor
    """[P,PAGE,G,D]"""
    pages: Tensor
    """int32 [N,M], the pages of each row: M of them at most. Only read."""
    length: Tensor
    """[N], the number of tokens so far, int64."""

    @property
    def fields_of_pages(self) -> tuple[str, ...]:
        """Fields whose first axis is the page, not the row."""
        return "keys", "values"

    @property
    def room(self) -> int:
        """The most tokens of a row."""
        return self.pages.shape[1] * self.keys.shape[1]


class _Attend(NamedTuple):
    """The arguments of ``attend_pages``."""

    q: Tensor
    k: Tensor
    v: Tensor
    state: PagedAttentionState
    sequences: Sequences
    window: int | None
    cap: float | None


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, state: PagedAttentionState, sequences: Sequences, window: int | None = None, cap: float | None = None
) -> Tensor:  # fmt: skip
    """Write k and v [B,T,G,D] to the pages of their rows; the causal attention [B,T,H,D] of queries q [B,T,H,D] to the rows.

    v and the output may have heads of another size. ``cap``: scores s become cap tanh(s / cap).

    The output of a token is a function of its row alone, to the bit. In plain PyTorch, a row is processed in blocks of ``PAGE`` tokens from
    its first one in the call, then token by token.
    """
    return ATTEND_PAGES(_Attend(q, k, v, state, sequences, window, cap))


def unpaged(x: Tensor, size: int) -> str | None:
    """Why the kernels do not take heads of ``size`` elements of tensors like x, or None. Plain PyTorch waits for the device."""
    if size > LARGEST:
        return f"heads have at most {LARGEST} elements, these have {size}"
    return refusal(x)


def _refuses(c: _Attend) -> str | None:
    if c.cap is not None or c.v.shape[-1] != c.k.shape[-1]:
        return "scores are bounded, or heads of values have another size than those of keys"
    if (why := refusal(c.q, c.k, c.v, c.state.keys, c.state.values)) is not None or (why := unpaged(c.q, c.q.shape[-1])) is not None:
        return why
    if c.state.keys.dtype != c.q.dtype or c.state.values.dtype != c.q.dtype:
        return "pages must have the dtype of q"
    return None if c.state.keys[0].is_contiguous() and c.state.values[0].is_contiguous() else "pages must be contiguous"


def _by_kernel(c: _Attend) -> Tensor:
    sequences, state, kernels = c.sequences, c.state, over_pages()
    packed = sequences.cu_seqlens is not None
    tokens = kernels.Tokens(
        None if sequences.slots is None else sequences.slots.contiguous(), sequences.ends if packed else None,
        sequences.owner if packed else None, sequences.positions(sequences.read(state.length)).flatten(), sequences.count, sequences.tokens,
    )  # fmt: skip
    if not c.q.numel():
        return torch.zeros_like(c.q)
    given, q, k, v = kernels.Pages(*state[:3]), *(x.flatten(0, 1) for x in (c.q, c.k, c.v))
    kernels.store(k, v, given, tokens)
    output: Tensor = kernels.attend(q, given, tokens, q.shape[-1] ** -0.5, c.window)
    return output.view(c.q.shape)


def _by_sequence(c: _Attend) -> Tensor:
    """In plain PyTorch. Waits for the device."""
    q, k, v = (x.flatten(0, 1) for x in (c.q, c.k, c.v))
    output, count = q.new_zeros(*q.shape[:2], v.shape[-1]), c.sequences.count
    slots = list(range(count)) if c.sequences.slots is None else c.sequences.slots.tolist()
    bounds, lengths = c.sequences.bounds.tolist(), c.state.length.tolist()
    for row, begin, end in zip(slots, bounds, bounds[1:]):
        if row >= 0 and end > begin:
            _of_sequence(c, row, lengths[row], *(x[begin:end] for x in (q, k, v, output)))
    return output.view(*c.q.shape[:-1], v.shape[-1])


def _of_sequence(c: _Attend, row: int, before: int, q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> None:
    """``output`` [T,H,V] of tokens after ``before`` earlier ones."""
    state, size = c.state, c.state.keys.shape[1]
    after = before + q.shape[0]
    first = 0 if c.window is None else max(0, before - c.window + 1) // size * size
    ids = state.pages[row, first // size : -(-after // size)].long()
    places = torch.arange(before, after, device=q.device)
    where = state.pages[row].long().index_select(0, places // size), places % size
    state.keys.index_put_(where, k.to(state.keys.dtype))
    state.values.index_put_(where, v.to(state.values.dtype))
    wide = state_dtype(q.dtype)
    keys, values = (x[ids].flatten(0, 1).to(wide) for x in (state.keys, state.values))
    for x in (keys, values):
        x[after - first :] = 0  # what the page had before
    done = 0
    while done < len(q):
        block = size if len(q) - done >= size else 1
        at = before + done
        low = 0 if c.window is None else max(0, at - c.window + 1) // size * size
        part = slice(low - first, -(-(at + block) // size) * size - first)
        here = slice(done, done + block)
        output[here] = _attention(q[here], keys[part], values[part], at - low, c.window, c.cap)
        done += block


def _attention(q: Tensor, k: Tensor, v: Tensor, before: int, window: int | None, cap: float | None) -> Tensor:
    """The output [T,H,V] of queries that have ``before`` keys before their own. Keys [S,G,D] and values are in the dtype of sums."""
    (T, H, D), (S, G, _) = q.shape, k.shape
    i, j = (torch.arange(n, device=q.device) for n in (T, S))
    seen = j <= before + i[:, None]
    if window is not None:
        seen &= j > before + i[:, None] - window
    rows = q.to(k.dtype).view(T, G, H // G, D).permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format)  # in memory of its own
    scores = (rows.flatten(1, 2) @ k.permute(1, 2, 0)).view(G, H // G, T, S) * float(D**-0.5)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights.view(G, -1, S) @ v.transpose(0, 1)).view(G, H // G, T, -1).permute(2, 0, 1, 3).reshape(T, H, -1)


def _draw(draw: Draw, pieces: bool = False, window: int | None = None) -> _Attend:
    H, G, D = draw.size(6, 32), draw.size(2, 8), draw.size(24, 128)
    shape = (1, 37) if pieces else (3, 1)
    q, k, v = draw("q", *shape, H, D), draw("k", *shape, G, D), draw("v", *shape, G, D)
    keys, values = draw("pages", 25, 2, PAGE, G, D).unbind(1)  # rows of one memory, as the lengths are
    pages = draw.whole([*range(1, 11), *[0] * 10, *range(11, 21), 24, 23, 22, 21, *[0] * 6], torch.int32).view(4, 10)
    lengths = draw.whole([575, 9, 0, 9, 127, 9, 60, 9] if pieces else [575, 9, 0, 9, 600, 9, 63, 9])[::2]
    sequences = drawn(draw, q, [0, 1, 19, 19, 37] if pieces else (), [0, 2, 1, 3] if pieces else [2, 0, 3], in_place=True)
    return _Attend(q, k, v, PagedAttentionState(keys, values, pages, lengths), sequences, window, None)


ATTEND_PAGES: Chain[_Attend, Tensor] = Chain(
    "attend_pages",
    ChainForm(
        "pages", _by_kernel, _refuses,
        launches("penstock_paged_store", "penstock_paged_attention", "penstock_paged_attention_merge"),
        tuple(
            one
            for pieces in (False, True) for window in (None, 100)
            for one in examples(partial(_draw, pieces=pieces, window=window), gradients=False)
        ),
    ),
    plain("by_sequence", _by_sequence),
    results=lambda c, output: (output, c.state.keys, c.state.values),
)  # fmt: skip
