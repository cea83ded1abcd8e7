"""The ordered lists of forms, by pass. ``plan.py`` takes the first of a list that neither refuses nor avoids a call."""

from __future__ import annotations

from collections.abc import Callable

from ....gpu.forms import Form
from ....gpu.plan import Plan
from ..calls import InPlace, Whole
from . import chunks, chunks_hopper, groups, pieces, tokens, walks_hopper, weights_hopper
from .passes import BackwardForm, ForwardForm

CHUNK_FORWARD: tuple[ForwardForm, ...] = (walks_hopper.FORWARD, weights_hopper.FORWARD, chunks_hopper.FORWARD, chunks.FORWARD)
CHUNK_BACKWARD: tuple[BackwardForm, ...] = (
    groups.BACKWARD,
    walks_hopper.BACKWARD,
    walks_hopper.BACKWARD_WIDE,
    weights_hopper.BACKWARD,
    chunks_hopper.BACKWARD,
    chunks_hopper.BACKWARD_SPLIT,
    chunks_hopper.BACKWARD_FLOAT32,
    chunks.BACKWARD,
)
TOKEN_FORWARD: tuple[Form[Whole, Callable[[Whole], Plan]], ...] = (tokens.FORWARD,)
TOKEN_BACKWARD: tuple[BackwardForm, ...] = (tokens.BACKWARD,)
PIECES: tuple[pieces.PiecesForm, ...] = (pieces.HOPPER, pieces.PLAIN)
"""Of an update in place: whole pieces of 64 tokens."""
TOKENS_IN_PLACE: tuple[Form[InPlace, Callable[[Plan, InPlace, str, int, bool], None]], ...] = (tokens.IN_PLACE,)
"""Of an update in place: the tokens after the last piece."""
