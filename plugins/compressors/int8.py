"""8 bits a number: blocks of numbers share a scale, and each becomes one of 255 multiples of it.

About a quarter of float32, half of bfloat16. The error of a number is at most 1/254 of the largest magnitude of its
block (1/127 if `stochastic`). Rounding to the nearest alone would never send numbers that are small beside their
block's largest; error feedback (arXiv:1901.09847), which is on, sends them later. `stochastic` rounding (QSGD,
arXiv:1610.02132) is right in the mean without it, at the price of more noise, and keeps no copy of the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollstock import Payload, hookimpl
from rollstock.plugins.compressors._blocks import BlockOptions, dequantise, quantise
from rollstock.plugins.compressors._lossy import FeedbackOptions, LossyCompressor

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(kw_only=True)
class Int8Config(BlockOptions, FeedbackOptions):
    """Options of `compressor: {name: int8}`."""


class Int8(LossyCompressor[Int8Config]):
    """A payload holds `codes` [n] int8 and `scales` [blocks] float32."""

    def shrink(self, values: Tensor, dtype: torch.dtype, *, key: str) -> Payload:
        """See `LossyCompressor.shrink`."""
        noise = self.noise(key, values.device) if self.config.stochastic else None
        codes, scales, size = quantise(values, self.config.block_size, noise)
        return Payload({"codes": codes, "scales": scales}, values.shape, dtype, values={"block_size": size})

    def restore(self, payload: Payload) -> Tensor:
        """See `LossyCompressor.restore`."""
        return dequantise(payload.tensors["codes"], payload.tensors["scales"], payload.values["block_size"])


@hookimpl
def rollstock_compressor() -> type[Int8]:
    """Give the compressor class."""
    return Int8
