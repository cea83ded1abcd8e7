"""Summaries: what a run of tokens does to a state S [K,V]. A transition, linear in S, and a state that is added.

The transitions of a family are diagonal matrices or any matrices. Two runs, one after the other, are a run: ``first.then(second)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Transition(NamedTuple):
    """How a family writes transitions, as W columns [B,H,K,W] beside a state."""

    columns: Callable[[int], int]
    """W for K key channels."""
    moved: Callable[[Tensor, Tensor], Tensor]
    """The columns times a state [B,H,K,V]."""
    adjoint: Callable[[Tensor], Tensor]
    """The columns of the transposed matrix, which takes gradients of states back in time."""


DIAGONAL = Transition(lambda K: 1, lambda decay, S: decay.exp() * S, lambda decay: decay)
"""One column: the log decay of each row."""
MATRIX = Transition(lambda K: K, torch.matmul, lambda matrix: matrix.mT)
"""All of a matrix [K,K]."""


class Summary(NamedTuple):
    """What tokens do to a state: it becomes ``diag(exp(decay)) S + state``."""

    state: Tensor
    """[B,H,K,V]: the state after the tokens if that before them is ``initial_state``, float32 (float64 for float64 inputs)."""
    decay: Tensor
    """[B,H,K]: the log decay by which they multiply the state, natural logarithm, in the same dtype."""

    def after(self, state: Tensor) -> Tensor:
        """The state after the tokens, from that before them. This summary has no initial state."""
        return DIAGONAL.moved(self.decay[..., None], state) + self.state

    def then(self, later: Summary) -> Summary:
        """The summary of these tokens and those of ``later``, which has no initial state."""
        return Summary(later.after(self.state), self.decay + later.decay)


class MatrixSummary(NamedTuple):
    """What tokens do to a state by the delta rule: it becomes ``matrix S + state``."""

    state: Tensor
    """[B,H,K,V]: the state after the tokens if that before them is ``initial_state``, float32 (float64 for float64 inputs)."""
    matrix: Tensor
    """[B,H,K,K]: the product of the transitions of all tokens, that of the last one on the left, in the same dtype."""

    def after(self, state: Tensor) -> Tensor:
        """The state after the tokens, from that before them. This summary has no initial state."""
        return MATRIX.moved(self.matrix, state) + self.state

    def then(self, later: MatrixSummary) -> MatrixSummary:
        """The summary of these tokens and those of ``later``, which has no initial state."""
        return MatrixSummary(later.after(self.state), MATRIX.moved(later.matrix, self.matrix))
