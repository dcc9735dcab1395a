"""The compressor kind: what shrinks tensors that cross a network."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollstock.plugin import C, Plugin

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class Payload:
    """What goes over the wire: tensors by name, and how to read them.

    `num_bytes` is what the tensors occupy; shape and dtype are those of the tensor that was compressed.
    """

    tensors: dict[str, Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class Compressor(Plugin[C]):
    """Compresses gradients and weights. A lossy one may keep what it left out (`key` names the stream) and send it
    later."""

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
