"""Stretches of time of a profiled run: the stages, and the calls of workers within them.

For the profiler, which notes them, and the table, which adds them up. Times are nanoseconds of the wall clock, which is
what traces are stamped with too. Stages may overlap where a run generates and trains at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WORK_STAGES = ("generate", "score", "select", "prepare", "advantages", "update")
"""Stages in which a call of a worker is the model, the sampling or a reward at work. Calls of other stages (weights
that are handed over, states that are asked for) are the loop's own."""

ELSEWHERE = "(another thread)"
"""The stage of calls that another thread makes than the run's: batches that are generated ahead."""

OUTSIDE = ("evaluation", "checkpoint")
"""What happens between steps and is no part of one."""


@dataclass(frozen=True)
class Span:
    """One stretch: what it is called, when it began and ended, and in which stage it lies (its own name for a
    stage)."""

    name: str
    start: int
    end: int
    stage: str

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9


class Spans:
    """What was noted so far; threads may note at the same time."""

    def __init__(self) -> None:
        self.stages: list[Span] = []
        self.calls: list[Span] = []
        self._lock = threading.Lock()

    def add_stage(self, name: str, start: int, end: int) -> None:
        """Note a stage."""
        with self._lock:
            self.stages.append(Span(name, start, end, name))

    def add_call(self, name: str, start: int, end: int, stage: str) -> None:
        """Note a call of a worker."""
        with self._lock:
            self.calls.append(Span(name, start, end, stage))


def covered(spans: Iterable[Span], within: Sequence[Span] | None = None) -> float:
    """Seconds that lie in at least one of the spans (and in one of `within`); what overlaps counts once."""
    total = sum(end - start for start, end in _union(spans))
    if within is None:
        return total / 1e9
    both = 0
    outer = _union(within)
    for start, end in _union(spans):
        both += sum(max(0, min(end, last) - max(start, first)) for first, last in outer)
    return both / 1e9


def _union(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Disjoint stretches, in order."""
    joined: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if joined and span.start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], span.end))
        else:
            joined.append((span.start, span.end))
    return joined
