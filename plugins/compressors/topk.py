"""The largest numbers of each tensor, in full precision; the others wait until they have grown.

Sparsification by magnitude (Deep Gradient Compression, arXiv:1712.01887, section 3.1, with the plain residual in place
of its momentum correction; convergence: arXiv:1809.07599). By default a tenth is sent, in about 11.7% of the bytes of
float32. A smaller share sends less and delays the rest by more steps, which long runs bear. Without error feedback,
numbers that are never among the largest would never be learned from: switch it off only to measure that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollstock import Payload, hookimpl
from rollstock.plugins.compressors._indices import SparseOptions, decode_indices, encode_indices, largest
from rollstock.plugins.compressors._lossy import FeedbackOptions, LossyCompressor, narrow

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class TopKConfig(SparseOptions, FeedbackOptions):
    """Options of `compressor: {name: topk}`."""


class TopK(LossyCompressor[TopKConfig]):
    """A payload holds `numbers` [k], of the tensor's type, and the code of their indices."""

    def shrink(self, values: Tensor, dtype: torch.dtype, *, key: str) -> Payload:
        """See `LossyCompressor.shrink`."""
        size = values.numel()
        where = largest(values, self.config.num_sent(size))
        return Payload({"numbers": narrow(values[where], dtype), **encode_indices(where, size)}, values.shape, dtype)

    def restore(self, payload: Payload) -> Tensor:
        """See `LossyCompressor.restore`."""
        numbers, size = payload.tensors["numbers"], math.prod(payload.shape)
        where = decode_indices(payload.tensors, size, numbers.numel())
        return torch.zeros(size, dtype=numbers.dtype, device=numbers.device).index_copy_(0, where, numbers)


@hookimpl
def rollstock_compressor() -> type[TopK]:
    """Give the compressor class."""
    return TopK
