"""Which task comes next: a data position turned into a task, the same for a run and for its resumption."""

from __future__ import annotations

from typing import Any

from rollstock.errors import UserError
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
        index = position if size is None else permuted_index(self._seed, position, size)
        return self._environment.task("train", index)

    def heldout(self, count: int) -> list[Task]:
        """The first `count` held-out tasks, or all where there are fewer. Raises UserError if there are none."""
        size = self._size("heldout")
        return [self._environment.task("heldout", i) for i in range(count if size is None else min(count, size))]

    def epoch(self, position: int) -> float:
        """How often the training split was gone through, by `position`; 0 for endless ones."""
        size = self._size("train")
        return position / size if size else 0.0

    def _size(self, split: Split) -> int | None:
        size = self._environment.num_tasks(split)
        if size is not None and size <= 0:
            raise UserError(
                f"environment {self._environment.plugin_name!r} has no {split} tasks; "
                + ("give it held-out data, or set evaluation.every: 0, at_start: false and at_end: false" if split == "heldout" else "check its options")
            )
        return size
