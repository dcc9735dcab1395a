"""Leaving tokens out of an update, for extensions of this folder that decide which ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rollstock import Batch


@contextmanager
def training_on(batch: Batch, kept: Tensor) -> Iterator[None]:
    """Inside, action tokens that are not `kept` [N] bool are none: they have no loss, and no divisor counts them."""
    chosen = batch.flat("action_mask")
    batch.set_flat("action_mask", chosen & kept)
    try:
        yield
    finally:
        batch.set_flat("action_mask", chosen)
