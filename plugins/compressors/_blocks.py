"""Symmetric quantisation to 8 bits, block by block.

For compressors that send fewer bits a number. A block of numbers shares one scale, its largest magnitude over 127; a
number becomes the nearest multiple of it, or, stochastically, one of its two neighbours, so that its mean is right
(QSGD, arXiv:1610.02132, section 3.1, with the largest magnitude in place of the norm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from rollstock import option

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = 127
"""The largest code; -128 is not used, so that codes are symmetric."""


@dataclass(kw_only=True)
class BlockOptions:
    """Options of quantisation."""

    block_size: int | None = option(
        256,
        "numbers that share one scale, of 4 bytes; null: all of a tensor",
        minimum=1,
        maximum=1_000_000_000,
    )
    stochastic: bool = option(
        False, "round up or down at random, so that the mean is right, in place of to the nearest"
    )


def quantise(values: Tensor, block_size: int | None, noise: torch.Generator | None) -> tuple[Tensor, Tensor, int]:
    """Codes [n] int8, scales [blocks], and the size of a block, for values [n], n >= 1.

    noise: what stochastic rounding draws from; None rounds to the nearest, halves to even. A block of zeros, or one
    whose scale is too small for its type, has the scale 0.
    """
    size = min(block_size or values.numel(), values.numel())
    blocks = _blocks(values, size)
    scales = torch.linalg.vector_norm(blocks, ord=torch.inf, dim=-1) / LEVELS
    units = blocks / torch.where(scales > 0, scales, torch.ones_like(scales))[:, None]
    if noise is None:
        units = units.round_()
    else:
        units = units.add_(torch.rand(units.shape, generator=noise, device=units.device, dtype=units.dtype)).floor_()
    codes = units.clamp_(-LEVELS, LEVELS).to(torch.int8).reshape(-1)
    if codes.numel() > values.numel():  # a copy, so that nothing that stands behind the codes travels with them
        codes = codes[: values.numel()].clone()
    return codes, scales, size


def dequantise(codes: Tensor, scales: Tensor, size: int) -> Tensor:
    """Values [n], in the type of the scales."""
    values = _blocks(codes.to(scales.dtype), size) * scales[:, None]
    return values.reshape(-1)[: codes.numel()]


def _blocks(values: Tensor, size: int) -> Tensor:
    """[blocks, size], the last one filled up with zeros."""
    return pad(values, (0, -values.numel() % size)).reshape(-1, size)
