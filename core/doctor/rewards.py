"""Rewards that hold a model: whether its directory is there, and how large it is.

Options are known by the names that the field uses (`path`, `dtype`), as in `rollstock.doctor.memory`. What else a
reward refuses shows when its process starts, in a dry run at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollstock.doctor.finding import Finding
from rollstock.doctor.memory import BYTES, FLOAT

if TYPE_CHECKING:
    from rollstock.section import RewardSection


def examine_rewards(rewards: Sequence[RewardSection]) -> Iterator[Finding]:
    """Look for the file or directory of every reward that has the option `path`."""
    for index, reward in enumerate(rewards):
        path = reward.get("path")
        if isinstance(path, str) and not Path(path).expanduser().exists():
            yield Finding(
                "warning",
                f"rewards.{index}.path",
                f"there is no {path} on this machine, where the reward {reward.name!r} may look for it",
                "mend the path, unless rewards are scored on another machine",
            )


def model_bytes(rewards: Sequence[RewardSection]) -> int:
    """Bytes that the weights of models in the directories of rewards take, in the `dtype` of each; 0 without any."""
    total = 0
    for reward in rewards:
        path = reward.get("path")
        files = sorted(Path(path).expanduser().glob("*.safetensors")) if isinstance(path, str) else []
        total += sum(_num_elements(file) for file in files) * BYTES.get(str(reward.get("dtype")), FLOAT)
    return total


def _num_elements(file: Path) -> int:
    """Numbers in a safetensors file; 0 for a broken one, which the reward itself will refuse."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return 0
