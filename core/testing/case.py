"""What the algorithm kit works with: the algorithm, made-up columns of its own, and batches of its group size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollstock.batch import Batch
from rollstock.interfaces.algorithm import Algorithm
from rollstock.testing.batches import make_batch
from rollstock.testing.subject import Subject
from rollstock.testing.trial import Columns, prepare

MOST_SAMPLES = 4  # a group in a test; larger groups cost time and show nothing more


@dataclass(frozen=True)
class AlgorithmCase:
    """The algorithm under test and the made-up values of its own columns."""

    subject: Subject[Algorithm[Any]]
    columns: Columns

    def make(self) -> Algorithm[Any]:
        """A fresh instance."""
        return self.subject.make()

    def batch(self, *, observations: bool = True) -> Batch:
        """A batch with groups as large as the algorithm asks for, four at most."""
        size = min(self.make().samples_per_prompt, MOST_SAMPLES)
        return make_batch(size, num_groups=3 if size > 1 else 8, observations=observations)

    def prepared(self, algorithm: Algorithm[Any]) -> Batch:
        """A batch with the columns that the algorithm declared."""
        batch = self.batch()
        prepare(algorithm, batch, self.columns)
        return batch
