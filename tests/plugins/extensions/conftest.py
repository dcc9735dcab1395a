"""What tests of extensions share: batches with chosen numbers, stages around them, and runs that are over soon."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollstock import Batch, Extension, Metric, Task, Trajectory, hookimpl, merge_metrics
from rollstock.launch import train
from rollstock.manager import make_manager

SECTIONS: dict[str, Any] = {
    "algorithm": {"name": "grpo", "group_size": 4},
    "sampling": {"max_new_tokens": 3},
    "train": {"steps": 2, "prompts_per_step": 4},
    "trackers": ["jsonl"],
}
"""What the small runs of these tests have of their own."""


class StandInRun(SimpleNamespace):
    """What extensions read of a run."""

    def record(self, metrics: dict[str, Metric]) -> None:
        self.recorded = merge_metrics([self.recorded, metrics])

    def value(self, name: str) -> float:
        return self.recorded[name].value


@pytest.fixture
def stand_in() -> Callable[..., StandInRun]:
    return lambda **parts: StandInRun(recorded={}, **parts)


class CoreStages:
    """Stages that leave the batch as it is."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def _look(self, batch: Batch) -> bool:
        self.seen.append({name: batch[name].clone() for name in batch.columns})
        return True

    @hookimpl
    def rollstock_score(self, run, batch):
        return self._look(batch)

    @hookimpl
    def rollstock_prepare(self, run, batch):
        return self._look(batch)

    @hookimpl
    def rollstock_advantages(self, run, batch):
        return self._look(batch)

    @hookimpl
    def rollstock_update(self, run, batch):
        self._look(batch)
        return {}


@pytest.fixture
def stages() -> Callable[..., Any]:
    """`stages(run, {"name": ...}, ...)` calls a stage by name with these extensions around it; returns what it saw."""

    def make(run: Any, *sections: dict[str, Any]) -> Callable[[str, Batch], dict[str, Any]]:
        manager, core = make_manager(), CoreStages()
        manager.register("stages", core)
        extensions = manager.create_all(Extension, list(sections))

        def call(stage: str, batch: Batch) -> dict[str, Any]:
            assert getattr(manager.hook, f"rollstock_{stage}")(run=run, batch=batch) in (True, {})
            return core.seen.pop()

        call.extensions = extensions  # type: ignore[attr-defined]
        return call

    return make


@pytest.fixture
def scored_batch() -> Callable[..., Batch]:
    """A batch of scores, one a trajectory of one token; None where nobody gave one."""

    def make(rewards: Sequence[float | None], *, metadata: Sequence[dict[str, Any]] | None = None) -> Batch:
        return Batch.from_trajectories(
            [
                Trajectory(
                    prompt=torch.tensor([1]),
                    response=torch.ones(1, dtype=torch.int64),
                    action_mask=torch.ones(1, dtype=torch.bool),
                    rollout_logprobs=torch.zeros(1),
                    versions=torch.zeros(1, dtype=torch.int64),
                    group=0,
                    task_id=f"task-{place}",
                    reward=reward,
                    metadata={
                        "sample": SimpleNamespace(
                            task=Task(id=f"task-{place}", prompt="", metadata=metadata[place] if metadata else {})
                        )
                    },
                )
                for place, reward in enumerate(rewards)
            ]
        )

    return make


@pytest.fixture
def ratio_batch() -> Callable[..., Batch]:
    """A batch whose column `old_logprobs` is the sampler's plus the logarithms of the ratios given for each token; a
    ratio of None stands for an observation."""

    def make(*ratios: Sequence[float | None], scores: Sequence[float] | None = None) -> Batch:
        rows = []
        for place, row in enumerate(ratios):
            mask = torch.tensor([ratio is not None for ratio in row], dtype=torch.bool)
            rows.append(
                Trajectory(
                    prompt=torch.tensor([1]),
                    response=torch.ones(len(row), dtype=torch.int64),
                    action_mask=mask,
                    rollout_logprobs=torch.where(mask, -1.0, 0.0),
                    versions=torch.where(mask, 0, -1),
                    group=place // 2,
                    reward=scores[place] if scores else 1.0,
                )
            )
        batch = Batch.from_trajectories(rows)
        logs = [5.0 if ratio is None else math.log(ratio) for row in ratios for ratio in row]  # masked: anything
        batch.set_flat("old_logprobs", batch.flat("rollout_logprobs") + torch.tensor(logs))
        return batch

    return make


@pytest.fixture
def steps_of_run(small_run: Callable[..., Any], tmp_path: Path) -> Callable[..., list[dict[str, float]]]:
    """Trains a small run in a folder, with these sections, and gives the metrics of each step."""

    def run(folder: str, *overrides: str, **sections: Any) -> list[dict[str, float]]:
        directory = tmp_path / folder
        outcome = train(small_run(directory, *overrides, **{**SECTIONS, **sections}))
        assert outcome.status == "finished"
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        return [row["metrics"] for row in rows if "metrics" in row]

    return run
