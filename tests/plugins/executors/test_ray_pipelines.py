"""Generation ahead of training, with workers in processes of their own: what one process gives, and nothing lost."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstock import RunError
from rollstock.launch import resume, train
from rollstock.plugins.executors._group import RayGroup
from rollstock.plugins.executors._revival import Revival
from rollstock.testing import read_metrics

from ...conftest import steady_rows
from .conftest import assert_same, small

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("one_thread")]

LONGER = ("train.steps=4", "sampling.max_new_tokens=6", "recovery.backoff_s=0.01")


def metric(run: Path, name: str) -> list[Any]:
    return [row["metrics"][name] for row in steady_rows(run) if "metrics" in row]


def recovered(run: Path, name: str) -> float:
    return sum(row.get("metrics", {}).get(f"recovery/{name}", 0.0) for row in read_metrics(run))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A double buffer in one process, which nobody disturbs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("runs") / "local"
    train(small(path, "pipeline=double_buffer", *LONGER))
    torch.set_num_threads(before)
    return path


def test_a_double_buffer_of_two_processes_equals_that_of_one(tmp_path: Path, local: Path, cluster: Any) -> None:
    run = tmp_path / "ray"
    train(small(run, "pipeline=double_buffer", *LONGER, executor={"name": "ray", "address": cluster.address}))
    assert_same(run, local)
    assert metric(run, "pipeline/staleness_max") == [0, 1, 1, 1]
    assert resume(run, step=2).step == 4
    assert_same(run, local)


def test_an_asynchronous_run_keeps_its_bound_and_loses_nothing_with_a_generator_that_is_killed(
    tmp_path: Path, cluster: Any, kill: Callable[..., None]
) -> None:
    kill("rollout", "generate", 4)
    options = ("pipeline=async", "pipeline.max_staleness=2", "pipeline.partial_tokens=2", "roles.rollout.count=2")
    run = tmp_path / "ray"
    train(small(run, *options, *LONGER, executor={"name": "ray", "address": cluster.address}))
    assert max(metric(run, "pipeline/staleness_max")) <= 2
    assert metric(run, "train/num_trajectories") == [8, 8, 8, 8]
    assert metric(run, "train/position")[-1] == 16
    assert metric(run, "pipeline/num_in_flight")[-1] == 0
    assert recovered(run, "num_retries") == recovered(run, "num_replaced") == 1


@pytest.fixture
def kill_during_update(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """`kill_during_update(update, request)`: while the so-and-so-manieth update is under way, the generator is killed
    in a request of the thread that is ahead. It is replaced when the trainer is further on."""

    def arm(update: int, request: int) -> None:
        send, updates, requests = RayGroup.send, itertools.count(1), itertools.count(1)
        asked, updating = threading.Event(), threading.Event()

        def killing(self: RayGroup, only: int | None, called: str, *rest: Any) -> Any:
            is_ahead = threading.current_thread().name == "rollstock-generator"
            if (self.role, called) == ("rollout", "generate") and is_ahead and next(requests) == request:
                asked.set()
                assert updating.wait(120)
                os.kill(self.processes[0].pid, signal.SIGKILL)
            is_chosen = (self.role, called) == ("actor", "update") and next(updates) == update
            assert not is_chosen or asked.wait(120)
            sent = send(self, only, called, *rest)
            if is_chosen:
                updating.set()
            return sent

        monkeypatch.setattr(RayGroup, "send", killing)

    return arm


@pytest.mark.parametrize(("mode", "update"), [("double_buffer", 1), ("async", 2)])
def test_a_generator_that_is_replaced_during_an_update_goes_on_with_the_policy_before_it(
    tmp_path: Path, local: Path, cluster: Any, kill_during_update: Callable[[int, int], None], mode: str, update: int
) -> None:
    kill_during_update(update, 2)  # the first request of `async` was for the first two batches
    run = tmp_path / "ray"
    train(small(run, f"pipeline={mode}", *LONGER, executor={"name": "ray", "address": cluster.address}))
    assert recovered(run, "num_replaced") == 1
    if mode == "double_buffer":
        assert_same(run, local)
    for name in ("pipeline/staleness_mean", "training/rollout_logprob_diff_max"):  # what async does next, a clock says
        assert metric(run, name)[: update + 1] == pytest.approx(metric(local, name)[: update + 1], abs=1e-5)
    assert metric(run, "training/rollout_logprob_diff_max")[update] > 1e-3  # so that the policies can be told apart


def test_nobody_asks_a_generator_that_was_started_again_before_it_has_weights(
    tmp_path: Path, local: Path, cluster: Any, kill: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill("reward", "score", 2)  # whose process it shares; no request of the generator's thread is lost with it
    send, welcome, requests = RayGroup.send, Revival.welcome, itertools.count(1)
    is_built, is_asked = threading.Event(), threading.Event()

    def sending(self: RayGroup, only: int | None, called: str, *rest: Any) -> Any:
        is_ahead = threading.current_thread().name == "rollstock-generator"
        is_chosen = (self.role, called) == ("rollout", "generate") and is_ahead and next(requests) == 2
        assert not is_chosen or is_built.wait(120)
        sent = send(self, only, called, *rest)
        if is_chosen:
            is_asked.set()
        return sent

    def welcoming(self: Revival, rebuilt: Any) -> None:
        is_built.set()
        assert is_asked.wait(120)
        time.sleep(1)  # in which the request would be answered
        welcome(self, rebuilt)

    monkeypatch.setattr(RayGroup, "send", sending)
    monkeypatch.setattr(Revival, "welcome", welcoming)
    ray = {"name": "ray", "address": cluster.address}
    run = tmp_path / "ray"
    train(small(run, "pipeline=double_buffer", "roles.reward.colocate_with=rollout", *LONGER, executor=ray))
    assert_same(run, local)


@pytest.mark.parametrize("with_generator", [False, True])
def test_a_trainer_that_is_killed_goes_on_with_what_was_ahead(
    tmp_path: Path, local: Path, cluster: Any, kill: Callable[..., None], with_generator: bool
) -> None:
    kill("actor", "update", 3)
    if with_generator:
        kill("rollout", "generate", 4)  # of the batch that is generated meanwhile
    run = tmp_path / "ray"
    train(small(run, "pipeline=double_buffer", *LONGER, executor={"name": "ray", "address": cluster.address}))
    assert_same(run, local)
    assert recovered(run, "num_restarts") == 1
    assert recovered(run, "num_replaced") == 1 + with_generator


def test_an_asynchronous_run_whose_trainer_is_killed_goes_back_to_a_checkpoint_with_what_was_in_flight(
    tmp_path: Path, cluster: Any, kill: Callable[..., None]
) -> None:
    kill("actor", "update", 4)
    options = ("pipeline=async", "pipeline.partial_tokens=2", "recovery.state_gib=0", "checkpoint.every_steps=2")
    run = tmp_path / "ray"
    train(small(run, *LONGER, *options, executor={"name": "ray", "address": cluster.address}))
    assert recovered(run, "num_restarts") == recovered(run, "num_steps_again") == 1
    assert all(0 <= mean <= 1 for mean in metric(run, "pipeline/staleness_mean"))
    assert metric(run, "train/num_trajectories") == [8, 8, 8, 8]
    assert metric(run, "train/position")[-1] == 16


def test_without_retries_a_lost_generator_ends_the_run_in_the_step_that_waits_for_it_and_a_resume_goes_on(
    tmp_path: Path, local: Path, cluster: Any, kill_during_update: Callable[[int, int], None]
) -> None:
    kill_during_update(2, 3)
    ray = {"name": "ray", "address": cluster.address}
    run = tmp_path / "ray"
    with pytest.raises(RunError, match=r"rollout worker 0 .* died during 'generate'.*\(given up after 0") as caught:
        train(small(run, "pipeline=double_buffer", *LONGER, "recovery.max_retries=0", executor=ray))
    assert "in the generator's thread, ahead of the step that will need it" in caught.value.__notes__
    assert any(
        "the run failed in step 2; the newest checkpoint is of step 1" in note for note in caught.value.__notes__
    )
    assert resume(run).step == 4
    assert_same(run, local)
