"""Learning-rate schedules: the rate of each update of a run, as plain numbers."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]


def rate_factor(update: int, *, schedule: Schedule, warmup_updates: int, total_updates: int, min_ratio: float) -> float:
    """What the learning rate is multiplied with in `update` (counted from 0), between 0 and 1.

    It rises in a line over the first `warmup_updates`, the last of which has the full rate; then it stays
    (`constant`), or falls in a line or half a cosine to `min_ratio`, which the last of `total_updates` has, and every
    later one keeps.
    """
    if update < warmup_updates:
        return (update + 1) / warmup_updates
    if schedule == "constant":
        return 1.0
    # The update with the full rate is the last of the warm-up or, without one, the first.
    start = max(warmup_updates - 1, 0)
    span = total_updates - 1 - start
    progress = min((update - start) / span, 1.0) if span > 0 else 1.0
    left = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_ratio + (1.0 - min_ratio) * left
