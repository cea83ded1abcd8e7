"""The ordered lists of forms, by pass. ``plan.py`` takes the first of a list that neither refuses nor avoids a call."""

from __future__ import annotations

from collections.abc import Callable

from ....gpu.forms import Form
from ....gpu.plan import Plan
from ..calls import InPlace, Whole
from . import channels_sm90, chunks, groups, pieces, scalars_sm90, tokens, weights_sm90
from .passes import BackwardForm, ForwardForm

CHUNK_FORWARD: tuple[ForwardForm, ...] = (scalars_sm90.FORWARD, weights_sm90.FORWARD, channels_sm90.FORWARD, chunks.FORWARD)
CHUNK_BACKWARD: tuple[BackwardForm, ...] = (
    groups.BACKWARD,
    scalars_sm90.BACKWARD,
    weights_sm90.BACKWARD,
    channels_sm90.BACKWARD,
    channels_sm90.BACKWARD_SPLIT,
    channels_sm90.BACKWARD_FLOAT32,
    chunks.BACKWARD,
)
TOKEN_FORWARD: tuple[Form[Whole, Callable[[Whole], Plan]], ...] = (tokens.FORWARD,)
TOKEN_BACKWARD: tuple[BackwardForm, ...] = (tokens.BACKWARD,)
PIECES: tuple[pieces.PiecesForm, ...] = (pieces.HOPPER, pieces.PLAIN)
"""Of an update in place: whole pieces of 64 tokens."""
TOKENS_IN_PLACE: tuple[Form[InPlace, Callable[[Plan, InPlace, str, int, bool], None]], ...] = (tokens.IN_PLACE,)
"""Of an update in place: the tokens after the last piece."""
