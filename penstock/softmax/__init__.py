"""Exact softmax attention, a room of its own: what hybrid models put between their recurrent layers."""

from .attention import softmax_attention

__all__ = ["softmax_attention"]
