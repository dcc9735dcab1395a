"""Generation ahead of training, with workers in processes of their own: what one process gives, and nothing lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstock import WorkerLostError
from rollstock.launch import resume, train

from ...conftest import steady_rows
from .conftest import assert_same, small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

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


@pytest.mark.parametrize("mode", ["double_buffer", "async"])
def test_a_generator_that_is_killed_loses_nothing_that_was_asked_for(
    tmp_path: Path, cluster: Any, kill: Callable[..., None], mode: str
) -> None:
    kill("rollout", "generate", 4)
    run = tmp_path / "ray"
    train(small(run, f"pipeline={mode}", *LONGER, executor={"name": "ray", "address": cluster.address}))
    assert metric(run, "train/num_trajectories") == [8, 8, 8, 8]
    assert metric(run, "train/position")[-1] == 16


def test_a_trainer_that_is_killed_goes_on_with_what_was_ahead(
    tmp_path: Path, cluster: Any, kill: Callable[..., None]
) -> None:
    kill("actor", "update", 3)
    run = tmp_path / "ray"
    train(small(run, "pipeline=double_buffer", *LONGER, executor={"name": "ray", "address": cluster.address}))
    train(small(tmp_path / "local", "pipeline=double_buffer", *LONGER))
    assert_same(run, tmp_path / "local")


def test_without_retries_a_lost_generator_ends_the_run_in_the_step_that_waits_for_it(
    tmp_path: Path, cluster: Any, kill: Callable[..., None]
) -> None:
    kill("rollout", "generate", 4)
    none = ("recovery.max_retries=0", "recovery.max_restarts=0")
    ray = {"name": "ray", "address": cluster.address}
    with pytest.raises(WorkerLostError, match="rollout worker 0") as caught:
        train(small(tmp_path / "ray", "pipeline=async", *none, *LONGER, executor=ray))
    assert "in the generator's thread" in " ".join(caught.value.__notes__)
    assert resume(tmp_path / "ray").step == 4
