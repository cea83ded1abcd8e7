"""Exact softmax attention, for the layers of hybrid models that are not recurrent: a family of one operator."""

from . import registration  # noqa: F401  # makes the family known
from .declaration import FUNCTION
from .functional import softmax_attention
from .operators import FAMILY

__all__ = ["FAMILY", "FUNCTION", "softmax_attention"]
