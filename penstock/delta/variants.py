"""THE TABLE: every variant of the delta rule, one frozen row each. Pure data, no torch.

All rows are the same recurrence, over a state S of shape [K, V] for each sequence and head, with o_t = scale * q_t S_t::

    removal "after" the decay:   w_t = a_t diag(exp(g_t)) S_{t-1}          "before":   w_t = a_t S_{t-1}
    one stream:    S_t = diag(exp(g_t)) S_{t-1} + beta_t b_t^T (v_t + w_t)            with a = -k, b = k
    two streams:   S_t = diag(exp(g_t)) S_{t-1} + b_t^T w_t + k_t^T v_t

They differ in the number of streams, in what the removal reads, in the shape of the log decay g, and in the default scale.
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
    streams: Literal[1, 2]
    """1: k is both the removed and the written key, there is a beta, and a = -k, b = k. 2: a, b and k are three inputs."""
    removal: Literal["after", "before"]
    """Whether the removal reads the state after the decay of its token or before it."""
    decay: Literal["", "BTH", "BTHK"]
    """The axes of the log decay: none; per token and head; per token and channel."""
    gate: Literal["", "g", "w"]
    """The log decay's name in this variant's literature."""
    raw: Literal["", "softplus", "sigmoid"]
    """How a log decay follows from a raw gate x: not at all; -exp(A_log) softplus(x + dt_bias); -exp(-1/2) sigmoid(x)."""
    bounded: bool
    """Whether a raw gate may have a lower bound: then the log decay is lower_bound sigmoid(exp(A_log) (x + dt_bias))."""
    query: Literal["q", "r"]
    """The query's name in this variant's literature."""
    scale: float | None
    """The default scale; None is K ** -0.5."""
    source: str
    """Where the formula is published."""

    @property
    def bias(self) -> str:
        """The axes of dt_bias, those of the log decay without batch and tokens; none if there is no such bias."""
        return self.decay[2:] if self.raw == "softplus" else ""


def _table(*rows: Variant) -> Mapping[str, Variant]:
    return MappingProxyType({row.name: row for row in rows})


VARIANTS: Mapping[str, Variant] = _table(
    Variant("delta_rule", 1, "after", "", "", "", False, "q", None, "Yang et al. 2024 (DeltaNet), arXiv 2406.06484"),
    Variant(
        "gated_delta_rule", 1, "after", "BTH", "g", "softplus", False, "q", None, "Yang et al. 2024 (Gated DeltaNet), arXiv 2412.06464"
    ),
    Variant("kda", 1, "after", "BTHK", "g", "softplus", True, "q", None, "Kimi Team 2025 (Kimi Linear), arXiv 2510.26692"),
    Variant("rwkv7", 2, "before", "BTHK", "w", "sigmoid", False, "r", 1.0, "Peng et al. 2025 (RWKV-7), arXiv 2503.14456"),
    Variant("dplr", 2, "before", "BTHK", "g", "", False, "q", None, "flash-linear-attention, dplr_delta_rule"),
)


def check_variant(function: str, variant: object) -> None:
    """Raise RangeError unless it is the name of a row."""
    if not isinstance(variant, str) or variant not in VARIANTS:
        complaints = Complaints(function)
        complaints.add(RangeError, "variant", f"one of {', '.join(VARIANTS)}", shortened(variant))
        complaints.raise_any()
