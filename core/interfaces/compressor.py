"""The compressor kind: what shrinks tensors that cross a network."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rollstock.plugin import C, Plugin

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class Payload:
    """What goes over the wire: tensors by name, and how to read them.

    shape and dtype are those of the tensor that was compressed; `values` is JSON.
    """

    tensors: dict[str, Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire: what the tensors occupy."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def raw_bytes(self) -> int:
        """Bytes of the tensor that was compressed."""
        return math.prod(self.shape) * self.dtype.itemsize


class Compressor(Plugin[C]):
    """Compresses gradients and weights. A lossy one may keep what it left out (`key` names the stream) and send it
    later."""

    is_identity: ClassVar[bool] = False
    """Whether tensors travel as they are, so that whoever would use it may as well do without."""

    def setup(self, *, seed: int, rank: int) -> None:
        """Called once, before the first tensor: the run's seed, for what is drawn at random, and the number of this
        process among those that exchange tensors, which may draw differently. Without it, both are 0."""

    @abstractmethod
    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        """Shrink a tensor of any shape. `key` names it over time (a parameter's name), for error feedback."""

    @abstractmethod
    def decompress(self, payload: Payload) -> Tensor:
        """The tensor, or what is left of it, with its shape and dtype."""

    def state(self) -> dict[str, Tensor]:
        """Residuals that must survive a restart."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take back what `state` gave."""
