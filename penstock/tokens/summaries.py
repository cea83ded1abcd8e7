"""Summaries: what a run of tokens does to a state S [K,V]. A transition, linear in S, and a state that is added.

The transitions of a family are diagonal matrices or any matrices. Two runs, one after the other, are a run: ``first.then(second)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Complaints, DeviceError, DtypeError, ShapeError, described


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
        """The state [B,H,K,V] after the tokens, from that before them. This summary has no initial state.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            It is no state of this summary.

        """
        return DIAGONAL.moved(self.decay[..., None], _before(self, state)) + self.state

    def then(self, later: Summary) -> Summary:
        """The summary of these tokens and those of ``later``, which has no initial state and the same heads.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            It is no summary of this kind, or of other heads.

        """
        _check_later(self, later)
        return Summary(later.after(self.state), self.decay + later.decay)


class MatrixSummary(NamedTuple):
    """What tokens do to a state by the delta rule: it becomes ``matrix S + state``."""

    state: Tensor
    """[B,H,K,V]: the state after the tokens if that before them is ``initial_state``, float32 (float64 for float64 inputs)."""
    matrix: Tensor
    """[B,H,K,K]: the product of the transitions of all tokens, that of the last one on the left, in the same dtype."""

    def after(self, state: Tensor) -> Tensor:
        """The state [B,H,K,V] after the tokens, from that before them. This summary has no initial state. Errors: see ``Summary``."""
        return MATRIX.moved(self.matrix, _before(self, state)) + self.state

    def then(self, later: MatrixSummary) -> MatrixSummary:
        """The summary of these tokens and those of ``later``, which has no initial state and the same heads. Errors: see ``Summary``."""
        _check_later(self, later)
        return MatrixSummary(later.after(self.state), MATRIX.moved(later.matrix, self.matrix))


def _before(one: Summary | MatrixSummary, state: Tensor) -> Tensor:
    """A state before the tokens, in the dtype of the summary, which holds all its values."""
    complaints = Complaints(f"{type(one).__name__}.after")
    _check(complaints, "state", state, one.state)
    complaints.raise_any()
    return state.to(one.state.dtype)


def _check_later(first: Summary | MatrixSummary, later: object) -> None:
    """Refuse what is no summary like the first one."""
    complaints = Complaints(f"{type(first).__name__}.then")
    if type(later) is not type(first):
        remedy = "Pass the summary of the tokens that follow, of the same variant."
        complaints.add(DtypeError, "later", f"a {type(first).__name__}", described(later), remedy)
        complaints.raise_any()
    assert isinstance(later, Summary | MatrixSummary)
    for name, x, like in zip(first._fields, later, first):
        _check(complaints, f"later.{name}", x, like)
    complaints.raise_any()


def _check(complaints: Complaints, name: str, x: object, like: Tensor) -> None:
    """A tensor of the shape and on the device of another, whose dtype holds its values."""
    if not isinstance(x, Tensor):
        complaints.add(DtypeError, name, "a torch.Tensor", described(x), f"Pass a tensor of shape {list(like.shape)}.")
        return
    if x.shape != like.shape:
        remedy = "Heads, key and value channels are those of the summary."
        complaints.add(ShapeError, name, f"of shape {list(like.shape)}", str(list(x.shape)), remedy)
    if torch.promote_types(x.dtype, like.dtype) != like.dtype:
        complaints.add(DtypeError, name, str(like.dtype), str(x.dtype), f"Convert it with {name}.to({like.dtype}).")
    if x.device != like.device:
        complaints.add(DeviceError, name, f"on {like.device}", str(x.device), f"Move it with {name}.to({str(like.device)!r}).")
