"""The pipeline that generates when a step asks for it, and what the others have in common with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollstock.episodes import Episode
from rollstock.interfaces.environment import Sample, Task
from rollstock.metrics import Metrics
from rollstock.seeding import derive_seed

if TYPE_CHECKING:
    from torch import Tensor

    from rollstock.batch import Batch
    from rollstock.roles.reward import Scores
    from rollstock.run import Run

logger = logging.getLogger(__name__)


@dataclass
class Kept:
    """What a checkpoint keeps of a pipeline: plain values, and tensors."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Pipeline:
    """Synchronous: each step plays its own tasks, with the weights that it trains."""

    runs_ahead = False
    """Whether somebody may generate while the weights change, so that generators need a copy of their own."""

    def begin(self, run: Run) -> None:
        """The run begins or goes on after its last finished step; whatever a later one had taken is free again."""

    def next_tasks(self, run: Run) -> list[Task]:
        """The tasks of the next call of the generate stage."""
        return hand_out(run)

    def play(self, run: Run, tasks: Sequence[Task]) -> tuple[list[Episode], Metrics]:
        """The finished episodes of tasks that `next_tasks` gave, and what was measured."""
        first = run.position - len(tasks)
        return run.player.play(
            tasks,
            samples=run.algorithm.samples_per_prompt,
            sampling=run.sampling,
            seed_of=lambda place, k: sample_seed(run, first + place, k),
        )

    def check_played(self) -> None:
        """Called after the generate stage. Raises RunError if somebody answered it and left what was generated."""

    def score(self, run: Run, samples: Sequence[Sample]) -> Scores:
        """The scores of samples, mostly those of the episodes that `play` gave."""
        scores: Scores = run.roles["reward"].call("score", samples, run.step)
        return scores

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """While a run is put back, nobody generates: a worker that is built anew has no weights yet, and others have
        those of a step that is played again."""
        yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While the weights of the generators change, nobody generates."""
        yield

    def age(self, batch: Batch, version: int) -> Metrics:
        """How old the policy was that made a batch, in versions before the one that is trained."""
        return {}

    def finish_step(self) -> None:
        """The step is done: what it was trained on need not be kept any more."""

    def metrics(self) -> Metrics:
        """What was measured since this was last asked."""
        return {}

    def state(self, run: Run) -> Kept | None:
        """What must survive a restart: all that is not trained on, as after the last finished step."""
        return None

    def load_state(self, run: Run, kept: Kept) -> None:
        """Take back what `state` gave. Another mode plays those tasks again."""
        rounds: Sequence[Mapping[str, Any]] = kept.values.get("rounds", [])
        if rounds:
            run.progress.position = rounds[0]["position"]
            logger.warning("%d batches that were generated ahead are generated again", len(rounds))

    def abandon(self) -> None:
        """Nobody waits any more: end what is under way at once, whatever becomes of it."""

    def close(self) -> None:
        """End what is under way, in order. Raises nothing for what was never asked for."""


def hand_out(run: Run) -> list[Task]:
    """The next `train.prompts_per_step` tasks of the training split; the position moves on."""
    count = run.config.train.prompts_per_step
    tasks = [run.tasks.train(run.position + i) for i in range(count)]
    run.position += count
    return tasks


def sample_seed(run: Run, position: int, sample: int) -> int:
    """The seed of a trajectory, from the position of its task."""
    return derive_seed(run.seed, "sample", position, sample)
