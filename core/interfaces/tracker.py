"""The tracker kind: what records metrics and samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstock.plugin import C, Plugin


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a tracker is told of a run: its name, directory, resolved config, and the number of steps planned.

    resumed_at: the step whose checkpoint the run goes on from (its records up to it stay, later ones are void); None at
    first.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    num_steps: int
    resumed_at: int | None = None


class Tracker(Plugin[C]):
    """Records what a run tells. One that raises is reported once, counted, and never ends the run."""

    @abstractmethod
    def start(self, run: RunInfo, state: Mapping[str, Any]) -> None:
        """Open; `state` is what `state()` gave at the checkpoint that the run goes on from, empty at first."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a finished step (1-based), names sorted."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of an evaluation after `step` steps (0: before the first)."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The trajectories of a step: step, group, task_id, prompt, response, reward, rewards, finish_reason,
        num_tokens, advantage."""

    def message(self, text: str) -> None:
        """A sentence for the person who watches."""

    def state(self) -> dict[str, Any]:
        """What must survive a restart (a run id, a file position), as JSON; everything logged so far is on disk by
        then."""
        return {}

    def finish(self, status: str) -> None:
        """Close; status: finished, interrupted or failed."""
