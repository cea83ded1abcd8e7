"""THE TABLE: every variant of the recurrence, one frozen row each. Pure data, no torch.

All rows are the same recurrence, over a state S of shape [K, V] for each sequence and head::

    S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t
    read "updated":   o_t = scale * q_t S_t
    read "previous":  o_t = scale * q_t (S_{t-1} + diag(u) k_t^T v_t)     without a bonus: u = 0

They differ in the shape of the log decay g, in which state is read, in the bonus u, and in the default scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ..errors import Complaints, RangeError, shortened


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    """The public function's name."""
    decay: Literal["", "H", "BTH", "HK", "BTHK"]
    """The axes of the log decay: none; constant per head; per token and head; constant per channel; per token and channel."""
    read: Literal["updated", "previous"]
    """Whether o_t reads S_t, or S_{t-1} and the bonus."""
    bonus: bool
    """Whether there is a bonus u. Only variants that read the previous state can have one, and only ``reference`` computes those that read
    it without."""
    scale: float | None
    """The default scale; None is K ** -0.5."""
    query: Literal["q", "r"]
    """The query's name in this variant's literature."""
    gate: Literal["", "g", "w"]
    """The log decay's name in this variant's literature."""
    source: str
    """Where the formula is published."""

    def __post_init__(self) -> None:
        if self.bonus and self.read != "previous":
            complaints = Complaints("Variant")
            rule = f"False where the {self.read} state is read"
            complaints.add(RangeError, "bonus", rule, f"True for {self.name!r}", 'Read the "previous" state, or leave the bonus out.')
            complaints.raise_any()


def _table(*rows: Variant) -> Mapping[str, Variant]:
    return MappingProxyType({row.name: row for row in rows})


VARIANTS: Mapping[str, Variant] = _table(
    Variant("linear_attention", "", "updated", False, None, "q", "", "Katharopoulos et al. 2020, arXiv 2006.16236, eq. 16-20"),
    Variant("retention", "H", "updated", False, None, "q", "g", "Sun et al. 2023 (RetNet), arXiv 2307.08621, eq. 5-6"),
    Variant("simple_gla", "BTH", "updated", False, None, "q", "g", "Dao and Gu 2024 (Mamba-2), arXiv 2405.21060, eq. 2 with scalar A"),
    Variant("gla", "BTHK", "updated", False, None, "q", "g", "Yang et al. 2023 (GLA), arXiv 2312.06635, eq. 3"),
    Variant("rwkv5", "HK", "previous", True, 1.0, "r", "w", "Peng et al. 2024 (Eagle), arXiv 2404.05892, eq. 6"),
    Variant("rwkv6", "BTHK", "previous", True, 1.0, "r", "w", "Peng et al. 2024 (Finch), arXiv 2404.05892, eq. 19-20"),
)


def check_variant(function: str, variant: object) -> None:
    """Raise RangeError unless it is the name of a row."""
    if not isinstance(variant, str) or variant not in VARIANTS:
        complaints = Complaints(function)
        complaints.add(RangeError, "variant", f"one of {', '.join(VARIANTS)}", shortened(variant))
        complaints.raise_any()
