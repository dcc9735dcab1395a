"""Generation ahead of training, with workers in processes of their own: what one process gives, and nothing lost."""

from pathlib import Path
from typing import Any

import pytest

from rollstock.launch import resume, train

from ...conftest import steady_rows
from .conftest import assert_same, small

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("one_thread")]

LONGER = ("train.steps=4", "sampling.max_new_tokens=6")


def metric(run: Path, name: str) -> list[Any]:
    return [row["metrics"][name] for row in steady_rows(run) if "metrics" in row]


def test_a_double_buffer_of_two_processes_equals_that_of_one(tmp_path: Path, cluster: Any) -> None:
    for name, executor in (("local", {"name": "local"}), ("ray", {"name": "ray", "address": cluster.address})):
        train(small(tmp_path / name, "pipeline=double_buffer", *LONGER, executor=executor))
    assert_same(tmp_path / "ray", tmp_path / "local")
    assert metric(tmp_path / "ray", "pipeline/staleness_max") == [0, 1, 1, 1]
    resume_from = tmp_path / "ray"
    assert resume(resume_from, step=2).step == 4
    assert_same(tmp_path / "ray", tmp_path / "local")


def test_an_asynchronous_run_with_several_generators_keeps_its_bound(tmp_path: Path, cluster: Any) -> None:
    options = ("pipeline=async", "pipeline.max_staleness=2", "pipeline.partial_tokens=2", "roles.rollout.count=2")
    run = tmp_path / "ray"
    train(small(run, *options, *LONGER, executor={"name": "ray", "address": cluster.address}))
    assert max(metric(run, "pipeline/staleness_max")) <= 2
    assert metric(run, "train/num_trajectories") == [8, 8, 8, 8]
    assert metric(run, "train/position")[-1] == 16
    assert metric(run, "pipeline/num_in_flight")[-1] == 0
