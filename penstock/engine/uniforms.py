"""Random numbers that are functions of a seed and a position: the same on every device, for any number of rows.

The generator is SplitMix64 (Steele, Lea and Flood 2014), whose state after n steps can be computed directly. ``choosing_kernel.py`` has the
same generator.
"""

from __future__ import annotations

from torch import Tensor

STEP = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio."""
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
_MASK = 2**64 - 1


def mixed(value: int) -> int:
    """A hash of 64 bits."""
    for shift, factor in ROUNDS:
        value = (value ^ (value >> shift)) * factor & _MASK
    return value ^ (value >> LAST_SHIFT)


def key_of(seed: int) -> int:
    """The start of a seed's random numbers, 64 bits."""
    return mixed((seed + STEP) & _MASK)


def seed_of(seed: int, index: int) -> int:
    """The seed of completion ``index``."""
    return seed if index == 0 else mixed((seed + index * 0xD1342543DE82EF95) & _MASK)


def uniform(seed: int, position: int) -> float:
    """A number from 0 to 1 - 2**-53, a function of seed and position."""
    return (mixed((key_of(seed) + position * STEP) & _MASK) >> 11) * 2.0**-53


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """The same for int64 tensors: float64. Keys are bits of ``key_of``."""
    x = keys + positions * _signed(STEP)
    for shift, factor in ROUNDS:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return _shifted(x ^ _shifted(x, LAST_SHIFT), 11).double() * 2.0**-53


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - 2**64 if value >> 63 else value


def _shifted(x: Tensor, count: int) -> Tensor:
    """A logical shift to the right."""
    return x.bitwise_right_shift(count).bitwise_and(2 ** (64 - count) - 1)
