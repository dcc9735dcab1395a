"""What is compared: for each case what the other package calls it, what rollstock calls it, and with which options.

Plain data, so that every side reads one list: `verl_side.py` and `trl_side.py` the first half of a case,
`rollstock_side.py` the second. Each peer's file has two lists: `CASES`, on which both agree, and `DIFFERENT`, where
rollstock does otherwise on purpose; a case of those says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EVERY = ("plain", "turns", "special")
CLIP = {"clip": 0.2, "clip_high": 0.28}
GAMMA, LAM = 0.97, 0.9
# Measures of how far a sampler is from the trainer, by verl's names and ours.
MISMATCH = ("kl", "k3_kl", "training_ppl", "rollout_ppl", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio")


@dataclass(frozen=True)
class Case:
    """One quantity that two packages compute.

    kind: which function of each side runs it; theirs, options: what the peer calls it, and its options; ours: the
    plugin or function of rollstock, with `our_options`; sorts: the sorts of draws that it can take; outputs: those that
    are compared, all by default; why: the reason, where the two differ on purpose; tolerance: the difference allowed
    where they do not.
    """

    name: str
    kind: str
    theirs: str
    ours: str
    options: Mapping[str, Any] = field(default_factory=dict)
    our_options: Mapping[str, Any] = field(default_factory=dict)
    sorts: tuple[str, ...] = EVERY
    outputs: tuple[str, ...] = ()
    why: str = ""
    tolerance: float = 1e-6


def takes(case: Case, draw: str) -> bool:
    """Whether a case is computed for the draw of this name (`sort@seed`)."""
    return draw.split("@")[0] in case.sorts
