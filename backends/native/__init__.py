"""The rollout plugin `native`: generation inside the process, with any causal language model of transformers."""

from __future__ import annotations

from typing import Any

from rollstock import Rollout, hookimpl
from rollstock.backends.native.rollout import Native, NativeConfig

__all__ = ["Native", "NativeConfig"]


@hookimpl
def rollstock_rollout() -> type[Rollout[Any]]:
    """Give the engine class."""
    return Native
