"""The backend `torch`: transformers models on one device, packed without padding.

For configs that say `backend: {name: torch}`. The class is in `backend`, its options in `config`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollstock import hookimpl

if TYPE_CHECKING:
    from rollstock import Backend


@hookimpl
def rollstock_backend() -> type[Backend[Any]]:
    """Give the backend class."""
    from rollstock.backends.torch.backend import TorchBackend

    return TorchBackend
