"""Batch rewards: the part of the reward role that scores many samples in one call, in one process of their own."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rollstock.interfaces.environment import Sample
from rollstock.sandbox import Outcome, Sandbox
from rollstock.scoring import make_batch_scorer
from rollstock.seeding import derive_seed

START_LIMIT_S = 900.0
"""Seconds that the process may take to start: it may have to read a large model."""


class BatchScorer:
    """Holds the process of a config's batch rewards."""

    def __init__(
        self,
        *,
        environment: Mapping[str, Any],
        rewards: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        batch_sizes: Sequence[int],
        blocked: Sequence[str],
        seed: int,
        timeout_s: float,
        device: Mapping[str, Any],
    ) -> None:
        """`names` and `batch_sizes` are those of the `rewards`, in their order. The process is started, and what a
        reward refuses in its setup is raised here."""
        self._names, self._batch_sizes, self._seed = list(names), list(batch_sizes), seed
        factory = functools.partial(
            make_batch_scorer, dict(environment), list(rewards), list(blocked), seed, dict(device)
        )
        self._sandbox: Sandbox[tuple[int, Sequence[Sample]], list[float | None]] = Sandbox(
            factory, name="rewards", limit=timeout_s, start_limit=START_LIMIT_S
        )
        self._sandbox.start()

    def score(
        self, index: int, samples: Sequence[Sample], step: int, numbers: Sequence[int]
    ) -> list[Outcome[float | None]]:
        """What reward `index` makes of every sample, in batches; of those that raised, each sample alone. `numbers`
        decide the seeds, one a sample."""
        size = self._batch_sizes[index]
        batches = [list(range(start, min(start + size, len(samples)))) for start in range(0, len(samples), size)]
        found = self._ask(index, samples, batches, step, numbers)
        # A process that died or took too long is not tried again: the next one could, for every sample.
        raised = [batch for batch in batches if len(batch) > 1 and found[batch[0]].traceback]
        again = self._ask(index, samples, [[i] for batch in raised for i in batch], step, numbers)
        return list((found | again).values())

    def _ask(
        self, index: int, samples: Sequence[Sample], batches: Sequence[Sequence[int]], step: int, numbers: Sequence[int]
    ) -> dict[int, Outcome[float | None]]:
        outcomes = self._sandbox.map(
            [(index, [samples[i] for i in batch]) for batch in batches],
            names=[_named([samples[i] for i in batch]) for batch in batches],
            of=[f"reward {self._names[index]!r}"] * len(batches),
            when=f"step {step}",
            seeds=[
                derive_seed(self._seed, "batch reward", step, index, numbers[batch[0]]) % 2**32 for batch in batches
            ],
        )
        return {i: each for batch, out in zip(batches, outcomes, strict=True) for i, each in _single(out, batch)}

    def close(self) -> None:
        """End the process."""
        self._sandbox.close()


def _single(outcome: Outcome[list[float | None]], batch: Sequence[int]) -> list[tuple[int, Outcome[float | None]]]:
    """The outcome of each sample of a batch."""
    values = outcome.value if outcome.value is not None else [None] * len(batch)
    told = {"error": outcome.error, "traceback": outcome.traceback, "output": outcome.output}
    return [
        (i, Outcome(outcome.status, value=value, seconds=outcome.seconds / len(batch), **told))
        for i, value in zip(batch, values, strict=True)
    ]


def _named(samples: Sequence[Sample]) -> str:
    """What the log calls a batch: every task in it, since each of them may be the reason."""
    ids = ", ".join(repr(task_id) for task_id in dict.fromkeys(sample.task.id for sample in samples))
    return f"task {ids}" if len(samples) == 1 else f"{len(samples)} samples of {ids}"
