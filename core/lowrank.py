"""A weight's low-rank addition, and how the two become one, in the trainer and in a generator alike.

For backends that train adapters and for the weight sync that sends them alone. Both sides merge with this very code, so
that the merged weights are equal to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """`scale * b @ a` for `a` [rank, in] and `b` [out, rank]; turned over where the weight is kept as [in, out]."""

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool = False

    def merge(self, weight: Tensor) -> Tensor:
        """The weight with this added, a new tensor of the same shape and type."""
        product = self.b.detach() @ self.a.detach()
        return weight.detach() + ((product.T if self.transposed else product) * self.scale).to(weight.dtype)
