"""Which task comes next: a data position turned into a task, the same for a run and for its resumption."""

from __future__ import annotations

from typing import Any

from rollstock.errors import UserError, noted
from rollstock.interfaces.environment import Environment, Split, Task
from rollstock.seeding import derive_seed, permuted_index


class TaskSource:
    """Finite splits are shuffled anew in each epoch and repeated; endless ones are read in order."""

    def __init__(self, environment: Environment[Any], seed: int) -> None:
        self._environment = environment
        self._seed = derive_seed(seed, "task order")

    def train(self, position: int) -> Task:
        """The training task at a position without end. Raises UserError if the split is empty."""
        size = self._size("train")
        return self._task("train", position if size is None else permuted_index(self._seed, position, size))

    def heldout(self, count: int) -> list[Task]:
        """The first `count` held-out tasks, or all where there are fewer. Raises UserError if there are none."""
        size = self._size("heldout")
        return [self._task("heldout", i) for i in range(count if size is None else min(count, size))]

    def epoch(self, position: int) -> float:
        """How often the training split was gone through, by `position`; 0 for endless ones."""
        size = self._size("train")
        return position / size if size else 0.0

    def check(self, *, heldout: bool) -> None:
        """Raise UserError now for what a run would run into later: a split that it needs and that is empty."""
        self._size("train")
        if heldout:
            self._size("heldout")

    def _task(self, split: Split, index: int) -> Task:
        with noted(f"environment {self._environment.plugin_name!r} raised this in task({split!r}, {index})"):
            return self._environment.task(split, index)

    def _size(self, split: Split) -> int | None:
        size = self._environment.num_tasks(split)
        if size is None or size > 0:
            return size
        ways_out = {
            "train": "check its options",
            "heldout": "give it held-out data, or set evaluation.every: 0, at_start: false and at_end: false",
        }
        raise UserError(f"environment {self._environment.plugin_name!r} has no {split} tasks; {ways_out[split]}")
