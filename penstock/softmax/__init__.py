"""Exact softmax attention, a room of its own: what hybrid models put between their recurrent layers."""

from .attention import softmax_attention
from .problem import FUNCTION

__all__ = ["FUNCTION", "softmax_attention"]
