"""Rollout workers join and leave during a run, which learns what it would with one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstock.launch import train
from rollstock.plugins.schedulers.elastic import Elastic
from rollstock.testing import read_metrics

from .conftest import assert_same, small

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the scheduler wants after each step, in place of what it would find."""
    wanted = [3, 1, 2, 2]
    left: Iterator[int] = iter(wanted)
    monkeypatch.setattr(Elastic, "num_workers", lambda self, load: next(left) if load.role == "rollout" else None)
    return wanted


def column(run: Path, name: str) -> list[float]:
    rows = [row["metrics"] for row in read_metrics(run) if "metrics" in row]
    return [row[name] for row in rows if name in row]


@pytest.mark.usefixtures("judged")
def test_results_do_not_depend_on_who_joined_and_left(tmp_path: Path, cluster: Any, script: list[int]) -> None:
    steps = ["train.steps=5", "checkpoint.every_steps=0"]
    train(small(tmp_path / "local", *steps, extensions=["herald"]))
    ray = {"name": "ray", "address": cluster.address}
    elastic = {"name": "elastic"}
    train(
        small(tmp_path / "ray", *steps, "roles.rollout.count=2", executor=ray, scheduler=elastic, extensions=["herald"])
    )
    assert_same(tmp_path / "ray", tmp_path / "local", other_counts=True)
    assert column(tmp_path / "ray", "scheduler/rollout_workers") == script
    assert (tmp_path / "ray/workers.txt").read_text().splitlines() == [f"started rollout {rank}" for rank in (2, 1)]
    assert all(0 < share <= 1 for share in column(tmp_path / "ray", "scheduler/rollout_utilisation"))
    assert column(tmp_path / "ray", "scheduler/rollout_queue") == [8.0] * 4


@pytest.mark.parametrize(
    ("taken", "cpus", "message"),
    [
        (0, 4, "no more workers of rollout: the 1 workers of rollout ask for 4 CPU beside"),
        (2, 2, "no more workers of rollout: no room in the Ray cluster"),  # what others have, they may give back
    ],
)
def test_where_there_is_no_room_the_run_goes_on_with_fewer(
    tmp_path: Path,
    cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    taken: int,
    cpus: int,
    message: str,
) -> None:
    import ray as peer

    monkeypatch.setattr(Elastic, "num_workers", lambda self, load: 2 if load.role == "rollout" else None)
    monkeypatch.setattr("rollstock.plugins.executors.ray._JOIN_S", 0.1)
    ray = {"name": "ray", "address": cluster.address}
    sizes = ["roles.actor.cpus=2", f"roles.rollout.cpus={cpus}", "roles.reward.cpus=1", "train.steps=2"]
    config = small(tmp_path / "ray", *sizes, executor=ray, scheduler={"name": "elastic"})
    try:
        if taken:
            peer.init(address=cluster.address, log_to_driver=False)
            peer.get(peer.util.placement_group([{"CPU": taken}]).ready(), timeout=60)
        train(config)
    finally:
        peer.shutdown()
    assert column(tmp_path / "ray", "scheduler/rollout_workers") == [1.0]
    assert any(message in text for text in caplog.messages)


def test_the_load_that_is_measured_makes_an_idle_worker_leave(tmp_path: Path, cluster: Any) -> None:
    ray = {"name": "ray", "address": cluster.address}
    elastic = {"name": "elastic", "idle": 0.9, "busy": 1.0, "patience": 1}
    counts = ["roles.rollout.count=2", "train.steps=3"]
    train(small(tmp_path / "ray", *counts, executor=ray, scheduler=elastic))
    assert column(tmp_path / "ray", "scheduler/rollout_workers")[-1] == 1.0
