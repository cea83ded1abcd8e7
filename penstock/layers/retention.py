"""Retention.

Source: Sun et al. 2023 (RetNet), arXiv 2307.08621, section 2; rotary embedding and gate as in the public checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Complaints, RangeError
from ..tokens.dtypes import state_dtype
from .heads import HeadsConfig, HeadsMixer
from .rotary import check_base, rotary, rotated
from .sequences import Sequences


@dataclass(frozen=True)
class RetentionConfig(HeadsConfig):
    """The sizes of a retention layer."""

    kind = "retention"
    num_heads: int = 8
    expand_v: float = 2.0
    rope_theta: float = 10000.0
    """The base of the rotary embedding."""

    def check(self, complaints: Complaints) -> None:
        """Check the base of the rotary embedding."""
        super().check(complaints)
        check_base(complaints, self.rope_theta)

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> Retention:
        """A new layer."""
        return Retention(self, hidden_size)


class RetentionState(NamedTuple):
    """The state of a layer."""

    kv: Tensor
    """[N,H,K,V], the state of the recurrence, float32 (float64 for float64 models)."""
    position: Tensor
    """[N], the number of tokens so far, int64, for the rotary embedding."""
    tails: Tensor
    """[N,W-1,...], the last inputs of the convolutions of q, k and v, concatenated; [N,0,0] without convolutions."""


class Retention(HeadsMixer):
    r"""Retention with rotary embedding: one constant decay per head, ``log(1 - 2 ** (-5 - h))``.

    .. math::
        q, k, v = R_t W_q x, R_t W_k x, W_v x, \qquad
        y = W_o (RMSNorm_V(retention(q, k, v)) \cdot silu(W_g x))

    R_t rotates channel i with channel i + K/2 by the angle ``t * rope_theta ** (-2 i / K)``. The norm is over each head.

    >>> y, state = RetentionConfig(num_heads=2).build(hidden_size=16)(torch.randn(1, 5, 16))
    >>> state.kv.shape, state.position
    (torch.Size([1, 2, 8, 16]), tensor([5]))
    """

    def __init__(self, config: RetentionConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.config = config
        if self.head_sizes[0] % 2:
            complaints = Complaints("RetentionConfig")
            complaints.add(RangeError, "expand_k", "such that K is even", f"K = {self.head_sizes[0]}", "Rotations take pairs of channels.")
            complaints.raise_any()

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> RetentionState:
        """Zeros."""
        position = torch.zeros(count, dtype=torch.int64, device=like.device)
        return RetentionState(self._initial_kv(count, like), position, self._initial_tails(count, like))

    def mix(self, x: Tensor, state: RetentionState, sequences: Sequences) -> tuple[Tensor, RetentionState]:
        """Y and the new state."""
        q, k, v, gate, _, tails = self._project(x, state.tails, sequences)
        position = sequences.read(state.position)
        cos, sin = rotary(sequences.positions(position), self.head_sizes[0], self.config.rope_theta, state_dtype(q.dtype))
        q, k = rotated(self._features(q), cos, sin), rotated(self._features(k), cos, sin)
        output, kv = sequences.recur("retention", q, self._served(k), self._served(v), state=state.kv)
        return self._project_output(output, gate, sequences), RetentionState(kv, position + sequences.lengths, tails)
