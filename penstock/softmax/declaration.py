"""The declaration of softmax attention for the frame (``penstock.call``), and its masks.

B batch, Tq queries, Tk keys, H heads of queries, G heads of keys and values, D elements of a head, N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..call.declaration import INDICES, Argument, Option, Result, Signature, Sizes, Wrong
from ..call.problem import Problem
from ..call.validation import finite
from ..errors import Complaints, ShapeError
from ..tokens.dtypes import state_dtype
from ..tokens.packing import cu_seqlens, offsets, one_row, ranges

FUNCTION = "softmax_attention"


class Attention(Problem):
    """A call. Query i of a sequence has position i + Tk - Tq, so the last query is aligned with the last key.

    With ``causal`` it attends to keys up to its position, else to all keys; with a ``window`` only to keys less than ``window`` away.
    """

    q: Tensor  # [B, Tq, H, D]
    k: Tensor  # [B, Tk, G, D], H a multiple of G
    v: Tensor  # [B, Tk, G, D]
    cu_seqlens: Tensor | None  # [N + 1] of queries, packed with B = 1
    cu_seqlens_k: Tensor | None  # [N + 1] of keys; None: as cu_seqlens
    causal: bool
    scale: float
    window: int | None
    return_lse: bool

    @property
    def reach(self) -> int | None:
        """The window, at most the number of tokens: positions are added to it in 32 bits."""
        return None if self.window is None else min(self.window, self.sizes["Tq"] + self.sizes["Tk"])

    @property
    def key_offsets(self) -> Tensor | None:
        """The offsets of keys, as ``cu_seqlens`` of queries."""
        return self.cu_seqlens if self.cu_seqlens_k is None else self.cu_seqlens_k

    def spans(self) -> list[tuple[slice, slice]]:
        """The ranges of queries and keys of each packed sequence, on the host. Waits for the device."""
        assert self.cu_seqlens is not None and self.key_offsets is not None  # noqa: PT018
        queries, keys = ranges(self.cu_seqlens), ranges(self.key_offsets)
        return [(slice(*one), slice(*other)) for one, other in zip(queries, keys)]

    def visible(self, rows: slice, columns: slice, Tq: int, Tk: int) -> Tensor:
        """The mask of queries ``rows`` and keys ``columns`` in a sequence of Tq queries and Tk keys: bool [rows, columns]."""
        i = torch.arange(rows.start, rows.stop, device=self.q.device)[:, None] + (Tk - Tq)
        j = torch.arange(columns.start, columns.stop, device=self.q.device)[None, :]
        seen = (j <= i) if self.causal else torch.ones_like(j <= i)
        if self.reach is not None:
            seen &= j > i - self.reach
            if not self.causal:
                seen &= j < i + self.reach
        return seen


def _groups(complaints: Complaints, tensors: Mapping[str, Tensor | None], sizes: Sizes) -> None:
    if sizes.get("G") and sizes.get("H", 0) % sizes["G"]:
        value = f"{sizes['H']} heads"
        complaints.add(ShapeError, "q", f"of a multiple of k's {sizes['G']} heads", value, "Each head of k and v serves as many of q.")


def _packing(complaints: Complaints, tensors: Mapping[str, Tensor | None], sizes: Sizes) -> None:
    if not {"cu_seqlens", "cu_seqlens_k"} <= tensors.keys():  # one of them is already reported
        return
    queries, keys = tensors["cu_seqlens"], tensors["cu_seqlens_k"]
    if queries is None and keys is not None:
        complaints.add(ShapeError, "cu_seqlens_k", "left out without cu_seqlens", list(keys.shape), "Pass both.")
    if queries is not None and keys is None and sizes.get("Tq") != sizes.get("Tk"):
        value = f"Tq = {sizes.get('Tq')} and Tk = {sizes.get('Tk')} without it"
        complaints.add(ShapeError, "cu_seqlens_k", "given if Tq and Tk differ", value, "Pass the offsets of keys.")


def _window(value: Any) -> Wrong | None:
    return Wrong("at least 1 (a token sees itself), or None", str(value)[:60]) if value < 1 else None


def _scale(value: Any, sizes: Sizes, about: Any) -> Any:
    return sizes["D"] ** -0.5 if value is None else value


SIGNATURE = Signature(
    FUNCTION,
    (
        Argument("q", "B Tq H D", gradient=True, hint="Tokens come before heads."),
        Argument("k", "B Tk G D", like="q", gradient=True, hint="Tokens come before heads."),
        Argument("v", "B Tk G D", like="q", gradient=True),
        cu_seqlens("Tq"),
        Argument("cu_seqlens_k", "N+1", INDICES, required=False, values=offsets("Tk")),
    ),
    nonempty="H G D",
    counts="B Tq Tk N",
    folded="H G",
    layout=("Tk", "G"),
    rules=(one_row, _groups, _packing),
)
OPTIONS = (
    Option("causal", "bool"),
    Option("scale", "float", optional=True, values=finite, resolve=_scale),
    Option("window", "int", optional=True, values=_window),
    Option("return_lse", "bool"),
)
RESULTS = (Result("output", "B Tq H D", saved=True), Result("lse", "B Tq H", dtype=state_dtype, wanted="return_lse", saved=True))
