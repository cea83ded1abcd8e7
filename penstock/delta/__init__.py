"""The delta rule of DeltaNet, gated DeltaNet, KDA, RWKV-7 and DPLR: a family of two operators and their implementations."""

from . import registration  # noqa: F401  # makes the family known
