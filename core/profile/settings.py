"""Which steps are profiled. Apart from the rest of the package, so that the command line need not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollstock.errors import UserError

_STEPS = re.compile(r"(\d+)(?:-(\d+))?")


def parse_steps(text: str) -> tuple[int, int]:
    """The first and the last step of `3` or `2-3`. Raises UserError for anything else."""
    match = _STEPS.fullmatch(text.strip())
    if match is None:
        raise UserError(f"--profile-steps: {text!r} is neither a step, such as 3, nor a range of steps, such as 2-3")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        raise UserError(f"--profile-steps: {text!r} is no range of steps: they count from 1, the smaller first")
    return first, last


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """What to profile.

    steps: the first and the last one; None: the second step that the run takes, or the first where there is no other,
    since whatever is made on first use would be in the first one's time. max_events: of a trace file; those of a
    process beyond it are counted in the table and left out of the file.
    """

    steps: tuple[int, int] | None = None
    max_events: int = 500_000

    def chosen(self, done: int, total: int) -> tuple[int, int]:
        """The first and the last step to profile in a run that has `done` of its `total` steps behind it.

        Raises UserError if it takes none of them.
        """
        if self.steps is None:
            step = min(done + 2, total)
            return step, step
        first, last = max(self.steps[0], done + 1), min(self.steps[1], total)
        if first > last:
            asked = "-".join(str(step) for step in dict.fromkeys(self.steps))
            left = f"takes the steps {done + 1} to {total}" if done < total else f"has taken its {total} steps"
            raise UserError(f"--profile-steps: {asked} cannot be profiled: this run {left}")
        return first, last
