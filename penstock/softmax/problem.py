"""One validated call of softmax attention, and which keys its queries see."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import Complaints, DtypeError, RangeError, ShapeError
from ..problem import FLOATS, check_packing, check_tensor, signature

FUNCTION = "softmax_attention"


@dataclass(frozen=True, eq=False)
class Attention:
    """A call. Query i of a sequence stands at i + Tk - Tq, so the last query stands at the last key.

    It sees the keys up to there if ``causal``, all of them if not, and with a ``window`` those that are less than ``window`` away.
    """

    q: Tensor  # [B, Tq, H, D]
    k: Tensor  # [B, Tk, G, D], H a multiple of G
    v: Tensor  # [B, Tk, G, D]
    cu_seqlens: Tensor | None  # [N + 1] of queries, packed with B = 1
    cu_seqlens_k: Tensor | None  # [N + 1] of keys; None where cu_seqlens is
    causal: bool
    scale: float
    window: int | None

    @property
    def sizes(self) -> dict[str, int]:
        """B, Tq, Tk, H, G, D and N by name."""
        (B, Tq, H, D), (Tk, G) = self.q.shape, self.k.shape[1:3]
        N = B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return {"B": B, "Tq": Tq, "Tk": Tk, "H": H, "G": G, "D": D, "N": N}

    @property
    def reach(self) -> int | None:
        """The window, but no wider than there are tokens: places are added to it in 32 bits."""
        return None if self.window is None else min(self.window, self.q.shape[1] + self.k.shape[1])

    @cached_property
    def signature(self) -> Hashable:
        """The same for all calls that differ in values only."""
        return signature(self.q, self.k, self.v, self.cu_seqlens, self.cu_seqlens_k, self.causal, self.scale, self.window)

    @classmethod
    def known(cls, signature: Hashable, *values: object) -> Attention:
        """A call of a signature that was found valid before, with these values for the fields."""
        a = object.__new__(cls)
        a.__dict__.update(zip(cls.__dataclass_fields__, values), signature=signature)
        return a

    def spans(self) -> list[tuple[slice, slice]]:
        """The queries and the keys of each packed sequence, on the host. Waits for the device."""
        assert self.cu_seqlens is not None
        assert self.cu_seqlens_k is not None
        queries, keys = (pairwise(ends.tolist()) for ends in (self.cu_seqlens, self.cu_seqlens_k))
        return [(slice(*one), slice(*other)) for one, other in zip(queries, keys)]

    def visible(self, rows: slice, columns: slice, Tq: int, Tk: int) -> Tensor:
        """Which of these keys each of these queries sees, of a sequence with so many of both: bool [rows, columns]."""
        i = torch.arange(rows.start, rows.stop, device=self.q.device)[:, None] + (Tk - Tq)
        j = torch.arange(columns.start, columns.stop, device=self.q.device)[None, :]
        seen = (j <= i) if self.causal else torch.ones_like(j <= i)
        if self.reach is not None:
            seen &= j > i - self.reach
            if not self.causal:
                seen &= j < i + self.reach
        return seen

    @classmethod
    def checked(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None,
        cu_seqlens_k: Tensor | None,
        causal: bool,
        scale: float | None,
        window: int | None,
    ) -> Attention:
        """Validate a call; raises the exceptions of ``errors.py`` with every broken rule."""
        complaints = Complaints(FUNCTION)
        for name, x, axes in (("q", q, "[B,Tq,H,D]"), ("k", k, "[B,Tk,G,D]")):
            if x.dim() != 4:
                complaints.add(ShapeError, name, f"of shape {axes}", list(x.shape), "Tokens come before heads.")
        complaints.raise_any()
        (B, Tq, H, D), (Tk, G) = q.shape, k.shape[1:3]
        if q.dtype not in FLOATS:
            complaints.add(DtypeError, "q", "float16, bfloat16, float32 or float64", q.dtype, "Convert it with q.to(...).")
        for name, size in (("H", H), ("G", G), ("D", D)):
            if size == 0:
                complaints.add(ShapeError, name, "at least 1", 0)
        if G and H % G:
            complaints.add(ShapeError, "q", f"of a multiple of k's {G} heads", f"{H} heads", "Each head of k and v serves as many of q.")
        sizes, same = {"B": B, "T": Tk, "G": G, "D": D}, (q.dtype,) if q.dtype in FLOATS else FLOATS
        check_tensor(complaints, "k", k, "BTGD", sizes, q.device, same)
        check_tensor(complaints, "v", v, "BTGD", sizes, q.device, same)
        if window is not None and not isinstance(window, (int, torch.SymInt)):
            complaints.add(DtypeError, "window", "a whole number or None", f"{window!r} of type {type(window).__name__}")
        elif window is not None and window < 1:
            complaints.add(RangeError, "window", "at least 1 (a token sees itself), or None", window)
        if cu_seqlens is not None:
            keys = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
            check_packing(complaints, "cu_seqlens", cu_seqlens, {"B": B, "T": Tq}, q.device)
            check_packing(complaints, "cu_seqlens" if cu_seqlens_k is None else "cu_seqlens_k", keys, {"B": B, "T": Tk}, q.device)
            if keys.shape != cu_seqlens.shape:
                complaints.add(ShapeError, "cu_seqlens_k", "as long as cu_seqlens", f"{list(keys.shape)} and {list(cu_seqlens.shape)}")
            cu_seqlens_k = keys
        elif cu_seqlens_k is not None:
            complaints.add(ShapeError, "cu_seqlens_k", "left out without cu_seqlens", list(cu_seqlens_k.shape), "Pass both.")
        complaints.raise_any()
        return cls(q, k, v, cu_seqlens, cu_seqlens_k, causal, max(D, 1) ** -0.5 if scale is None else float(scale), window)
