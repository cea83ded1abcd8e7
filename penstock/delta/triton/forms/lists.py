"""The ordered lists of forms, by pass. ``plan.py`` takes the first of a list that neither refuses nor avoids a call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....gpu.forms import Form
from ....gpu.plan import Plan
from ...declaration import Delta
from ..calls import Backward, Forward, InPlace
from . import (
    anchored_sm90,
    channels_backward_sm90,
    channels_float32_sm90,
    channels_sm90,
    chunks,
    float32_sm90,
    scalar_backward_sm90,
    scalar_float32_sm90,
    scalar_sm90,
    segments,
    tokens,
    wide_sm90,
)

InPlaceForm = Form[InPlace, Callable[[Plan, InPlace, str, int], None]]
"""Adds its launches to a plan, which write an output, for pieces of a number of tokens or for the tokens after them."""

CHUNK_FORWARD: tuple[Form[Forward, Callable[[Forward], Plan]], ...] = (
    channels_sm90.FORWARD,
    channels_float32_sm90.FORWARD,
    scalar_sm90.FORWARD,
    scalar_float32_sm90.FORWARD,
    wide_sm90.FORWARD,
    anchored_sm90.FORWARD,
    segments.FORWARD,
    chunks.FORWARD,
)
CHUNK_BACKWARD: tuple[Form[Backward, Callable[[Backward], Plan]], ...] = (
    channels_backward_sm90.BACKWARD,
    channels_float32_sm90.BACKWARD,
    scalar_backward_sm90.BACKWARD,
    scalar_float32_sm90.BACKWARD,
    wide_sm90.BACKWARD,
    anchored_sm90.BACKWARD,
    segments.BACKWARD,
    chunks.BACKWARD,
)
TOKEN_FORWARD: tuple[Form[Forward, Callable[[Forward], Plan]], ...] = (tokens.FORWARD,)
PIECES: tuple[InPlaceForm, ...] = (
    channels_sm90.PIECES,
    channels_float32_sm90.PIECES,
    scalar_sm90.PIECES,
    scalar_float32_sm90.PIECES,
    wide_sm90.PIECES,
    anchored_sm90.PIECES,
    chunks.PIECES,
)
"""Of an update in place: whole pieces of 64 tokens."""
TOKENS_IN_PLACE: tuple[InPlaceForm, ...] = (tokens.IN_PLACE,)
"""Of an update in place: the tokens after the last piece."""


def residuals_of(p: Delta) -> tuple[str, ...]:
    """The names, in plans, of what a forward pass may keep for the backward pass."""
    if p.q.dtype == torch.float32:
        return float32_sm90.KEPT
    return channels_sm90.kept(p) if "K" in p.variant.decay else scalar_sm90.kept(p)
