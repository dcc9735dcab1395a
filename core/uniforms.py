"""Random numbers that are a function of a seed and a position, for all rows of a batch at once.

A generator with a state would tie a sample to whatever was drawn before it. Here the number for token `position` of a
trajectory is a hash of (seed, position): it is the same alone, in a batch of 256, after a restart, and when a
half-finished response is continued. For engines that sample, and for routers that add noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = -7046029254386353131  # 0x9E3779B97F4A7C15, the odd constant of SplitMix64, as a signed number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1), float64, for every pair of `seeds` and `positions` (int64, broadcast against each other).

    The 53 high bits of `hashes` make the number.
    """
    return _shift_right(hashes(seeds, positions), 11).to(torch.float64) * 2.0**-53


def hashes(seeds: Tensor, positions: Tensor) -> Tensor:
    """64 random bits, int64, for every pair of `seeds` and `positions` (int64, broadcast against each other).

    SplitMix64 (Steele, Lea, Flood 2014) evaluated at a counter. The seed is mixed before the counter is added, so that
    neighbouring seeds do not give shifted copies of one stream.
    """
    return _mix(_mix(seeds * _STEP + 1) + positions * _STEP)


def as_int64(seed: int) -> int:
    """A seed of any size as the signed 64-bit number with the same low bits."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - (1 << 64) if low >> 63 else low


def _mix(value: Tensor) -> Tensor:
    """The finaliser of SplitMix64; products wrap around, as int64 tensors do."""
    value = (value ^ _shift_right(value, 30)) * _MIX_1
    value = (value ^ _shift_right(value, 27)) * _MIX_2
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """A shift that fills with zeros; the tensor's own shift would repeat the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
