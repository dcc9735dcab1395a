"""Run files are read whatever state they are in."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstock.checkpoint import CheckpointStore
from rollstock.errors import UserError
from rollstock.report.reading import read_run
from rollstock.rundir import RunDirectory


def test_broken_lines_cost_only_themselves_and_are_counted(write_run: Callable[..., Path]) -> None:
    path = write_run(metrics={1: {"a": 1.0}, 2: {"a": math.nan}})
    with (path / "metrics.jsonl").open("a") as file:
        file.write(
            'not json\n[1, 2]\n{"no": "step"}\n\n{"step": 3, "metrics": {"a": "text", "b": 2}}\n{"step": 4, "met'
        )
    run = read_run(path)
    assert list(run.metrics) == [1, 2, 3]
    assert math.isnan(run.metrics[2]["a"])
    assert run.metrics[3] == {"b": 2.0}
    assert run.unreadable == {"metrics.jsonl": 4}


def test_a_step_recorded_twice_counts_as_recorded_last(write_run: Callable[..., Path]) -> None:
    path = write_run(metrics={2: {"a": 1.0}, 1: {"a": 0.0}}, evaluations={0: {"eval/greedy/solved": 0.1}})
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "metrics": {"a": 5}}\n')
    run = read_run(path)
    assert run.metrics == {1: {"a": 0.0}, 2: {"a": 5.0}}
    assert run.evaluations == {0: {"eval/greedy/solved": 0.1}}


def test_missing_and_damaged_files_are_no_obstacle(write_run: Callable[..., Path]) -> None:
    path = write_run()
    (path / "metrics.jsonl").unlink()
    (path / "manifest.json").write_text("{")
    (path / "config.yaml").write_text("a: [")
    run = read_run(path)
    assert (run.metrics, run.config, run.manifest, run.last_step, run.status) == ({}, {}, {}, 0, "empty")
    assert run.unreadable == {"config.yaml": 1, "manifest.json": 1}
    assert run.rollouts(1) == []


def test_status_tells_finished_running_and_stopped_apart(write_run: Callable[..., Path]) -> None:
    path = write_run(metrics={19: {"a": 1.0}})
    assert read_run(path).status == "stopped"
    directory = RunDirectory(path)
    directory.lock()
    assert read_run(path).status == "running"
    assert read_run(path).status == "running", "looking does not drop the lock"
    directory.unlock()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "metrics": {}}\n')
    assert read_run(path).status == "finished"


def test_checkpoints_are_listed_and_damaged_ones_named(write_run: Callable[..., Path]) -> None:
    path = write_run()
    store = CheckpointStore(path / "checkpoints")
    for step in (5, 10):
        store.save(step, tensors={"actor/model": {"w": torch.ones(3)}}, state={}, score=step / 10)
    (path / "checkpoints" / "step-000010" / "state.json").unlink()
    run = read_run(path)
    assert [(one.step, one.score) for one in run.checkpoints] == [(5, 0.5)]
    assert "state.json" in run.damaged_checkpoints[0]


def test_rollouts_are_listed_by_step(write_run: Callable[..., Path], sample: Callable[..., dict[str, Any]]) -> None:
    path = write_run(rollouts={3: [sample(1.0)], 12: [sample(0.0), sample(None)]})
    (path / "rollouts" / "notes.txt").write_text("x")
    with (path / "rollouts" / "step-000012.jsonl").open("a") as file:
        file.write('{"half')
    run = read_run(path)
    assert run.rollout_steps() == [3, 12]
    assert len(run.rollouts(12)) == 2
    assert run.unreadable == {"step-000012.jsonl": 1}


def test_a_directory_without_a_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        read_run(tmp_path)
