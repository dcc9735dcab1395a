"""The plugins that a config gets without naming any: the only place in the core where concrete plugins are named, as
data.
"""

from __future__ import annotations

from typing import Any, Final

DEFAULT_PLUGINS: Final[dict[str, Any]] = {
    "backend": "torch",
    "rollout": "native",
    "rewards": ["environment"],
    "device": "cpu",
    "executor": "local",
    "scheduler": "dynamic_batch",
    "compressor": "none",
    "trackers": ["console", "jsonl"],
}
"""By section of the config. A run must name its algorithm and its environment itself."""
