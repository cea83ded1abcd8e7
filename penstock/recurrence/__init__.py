"""The recurrence of linear attention, RetNet, Mamba-2, GLA, RWKV-5 and RWKV-6: a family of three operators and their implementations."""

from . import registration  # noqa: F401  # makes the family known
