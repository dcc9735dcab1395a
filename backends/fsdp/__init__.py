"""The backend `fsdp`: transformers models spread over several processes by torch's `fully_shard` (FSDP2).

For configs that say `backend: {name: fsdp}`. The class is in `backend`, its options in `config`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollstock import hookimpl

if TYPE_CHECKING:
    from rollstock import Backend


@hookimpl
def rollstock_backend() -> type[Backend[Any]]:
    """Give the backend class."""
    from rollstock.backends.fsdp.backend import FSDPBackend

    return FSDPBackend
