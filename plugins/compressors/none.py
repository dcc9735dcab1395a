"""No compression: tensors cross the network as they are, to the bit.

The default, and the yardstick that lossy compressors are measured against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollstock import Compressor, NoOptions, Payload, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


class Uncompressed(Compressor[NoOptions]):
    """Hands tensors on without a copy; it keeps nothing, so that it has no state."""

    is_identity = True

    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        """A payload that holds `tensor` itself, whatever its shape and dtype."""
        return Payload(tensors={"whole": tensor}, shape=tuple(tensor.shape), dtype=tensor.dtype)

    def decompress(self, payload: Payload) -> Tensor:
        """The tensor that was put in, its shape restored (a transport may have flattened it)."""
        return payload.tensors["whole"].reshape(payload.shape)


@hookimpl
def rollstock_compressor() -> type[Compressor[Any]]:
    """The class of this plugin."""
    return Uncompressed
