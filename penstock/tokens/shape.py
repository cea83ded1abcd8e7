"""The sizes of a call over sequences, as tools write them."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ..errors import Complaints, RangeError, shortened

MOST_ELEMENTS = 1 << 56
"""Tensors of more elements have no size in bytes that torch can represent."""


class Shape(NamedTuple):
    """Sizes of one call: batch, tokens, heads, key channels and value channels of a head."""

    B: int
    T: int
    H: int
    K: int
    V: int

    @classmethod
    def parse(cls, text: str, function: str = "bench") -> Shape:
        """Read "B,T,H,K" or "B,T,H,K,V"; V defaults to K. Raises RangeError in the name of ``function``.

        >>> Shape.parse("1,54,32,64")
        Shape(B=1, T=54, H=32, K=64, V=64)
        """
        parts = [part.strip() for part in text.split(",")]
        sizes = [int(part) if part.isdecimal() and len(part) <= 18 else 0 for part in parts]
        complaints = Complaints(function)
        if len(sizes) not in (4, 5) or min(sizes) < 1:
            rule = "B,T,H,K or B,T,H,K,V, whole numbers of at least 1"
            complaints.add(RangeError, "shape", rule, shortened(text), "For example --shape 1,1024,32,64.")
        complaints.raise_any()
        shape = cls(*(sizes if len(sizes) == 5 else [*sizes, sizes[3]]))
        if prod(shape) >= MOST_ELEMENTS:
            complaints.add(RangeError, "shape", "one whose B * T * H * K * V is below 2**56", shortened(text))
        complaints.raise_any()
        return shape

    @property
    def text(self) -> str:
        """The text that ``parse`` reads, without V if it equals K."""
        return ",".join(map(str, self[:4] if self.V == self.K else self))

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Shape of the states [B,H,K,V]."""
        return self.B, self.H, self.K, self.V
