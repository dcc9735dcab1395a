"""Whole runs that generate ahead: repeatable, resumable, interruptible, with every stage and hook where it was."""

import dataclasses
import json
import logging
import shutil
import signal
import threading
import time
from typing import ClassVar

import pytest
import torch

from rollstock import Extension, NoOptions, RunError, hookimpl
from rollstock.checkpoint import CheckpointStore
from rollstock.launch import evaluate, resume, train

from ...conftest import steady_rows, trajectories

AHEAD = [pytest.param("double_buffer", marks=pytest.mark.slow), "async"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollstock-")]


def metrics_of(run, *names):
    rows = [row["metrics"] for row in steady_rows(run) if "metrics" in row]
    return [tuple(row.get(name) for name in names) for row in rows]


def test_the_same_seed_gives_the_same_double_buffered_run(small_run, tmp_path, assert_same_run):
    options = ["pipeline=double_buffer", "train.steps=5", "evaluation.every=2"]
    runs = [train(small_run(tmp_path / name, *options)).directory for name in ("one", "two")]
    assert_same_run(*runs)
    ages = metrics_of(runs[0], "pipeline/staleness_mean", "pipeline/staleness_max")
    assert ages == [(0, 0), (1, 1), (1, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize("mode", AHEAD)
def test_the_first_step_is_that_of_a_synchronous_run(small_run, tmp_path, mode):
    plain = train(small_run(tmp_path / "plain")).directory
    ahead = train(small_run(tmp_path / "ahead", f"pipeline={mode}")).directory
    first, other = (trajectories(run)["step-000001.jsonl"].splitlines() for run in (plain, ahead))
    rounded = [{**json.loads(row), "advantage": None} for row in first]
    assert rounded == [{**json.loads(row), "advantage": None} for row in other]
    assert [json.loads(row)["task_id"] for row in trajectories(plain)["step-000003.jsonl"].splitlines()] == [
        json.loads(row)["task_id"] for row in trajectories(ahead)["step-000003.jsonl"].splitlines()
    ]


def test_a_double_buffered_run_resumed_from_its_middle_equals_one_that_went_through(
    small_run, tmp_path, assert_same_run
):
    options = ["pipeline=double_buffer", "train.steps=6", "checkpoint.every_steps=1", "checkpoint.keep=9"]
    through = train(small_run(tmp_path / "through", *options, "evaluation.every=2")).directory
    for step in (4,):
        again = tmp_path / f"again-{step}"
        shutil.copytree(through, again)
        kept = CheckpointStore(again / "checkpoints").load(step)
        assert len(kept.state["pipeline"]["rounds"]) == 1
        assert kept.tensors["pipeline/episodes"]["tokens"].dtype == torch.int64
        resume(again, step=step)
        assert_same_run(again, through)


def test_an_asynchronous_run_goes_on_with_what_was_finished(small_run, tmp_path):
    options = ["pipeline=async", "pipeline.max_staleness=2", "train.steps=5", "checkpoint.every_steps=1"]
    through = train(small_run(tmp_path / "through", *options, "checkpoint.keep=9")).directory
    store = CheckpointStore(through / "checkpoints")
    kept = store.load(2)
    finished = [
        episode["seed"]
        for each in kept.state["pipeline"]["rounds"]
        for episode in each["episodes"]
        if not episode["is_active"]
    ]
    again = tmp_path / "again"
    shutil.copytree(through, again)
    assert resume(again, step=2).step == 5
    assert len(trajectories(again)) == 5
    before, after = (trajectories(run)["step-000003.jsonl"].splitlines() for run in (through, again))
    if len(finished) >= len(before):  # all of the next step's: they are trained on, and not sampled anew
        assert [json.loads(row)["response"] for row in before] == [json.loads(row)["response"] for row in after]
    positions = metrics_of(again, "train/position")
    assert positions[-1] == (5 * 2,)


class Alarm(Extension[NoOptions]):
    """Sends a signal in a stage of step 3, and notes in which thread it heard of what."""

    at: ClassVar[str] = ""
    numbers: ClassVar[list[int]] = []
    threads: ClassVar[dict[str, set[int]]] = {}

    def hear(self, moment, run):
        self.threads.setdefault(moment, set()).add(threading.get_ident())
        if moment == self.at and run.step == 3:
            type(self).at = ""
            for number in self.numbers:
                signal.raise_signal(number)

    @hookimpl(wrapper=True)
    def rollstock_generate(self, run, tasks):
        self.hear("generate", run)
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_score(self, run, batch):
        self.hear("score", run)
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_update(self, run, batch):
        self.hear("update", run)
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_sync(self, run):
        self.hear("sync", run)
        return (yield)

    @hookimpl
    def rollstock_step_end(self, run, step, metrics):
        self.hear("step_end", run)


@pytest.fixture
def alarm(installed):
    installed("extension", "alarm", Alarm)
    Alarm.at, Alarm.numbers = "", [signal.SIGTERM]
    Alarm.threads.clear()
    return Alarm


@pytest.mark.parametrize(
    "moment",
    ["score", *(pytest.param(each, marks=pytest.mark.slow) for each in ("generate", "update", "sync", "step_end"))],
)
def test_a_signal_at_any_moment_leaves_a_double_buffer_to_go_on_from(
    small_run, tmp_path, assert_same_run, alarm, moment
):
    options = ["pipeline=double_buffer", "train.steps=5", "checkpoint.every_minutes=0", "checkpoint.keep_best=false"]
    straight = train(small_run(tmp_path / "straight", *options, extensions=["alarm"])).directory
    alarm.at = moment
    stopped = train(small_run(tmp_path / "stopped", *options, extensions=["alarm"]))
    assert (stopped.status, alarm.at) == ("interrupted", "")
    assert resume(stopped.directory).status == "finished"
    assert_same_run(stopped.directory, straight)


def test_a_signal_leaves_an_asynchronous_run_to_go_on_from(small_run, tmp_path, alarm):
    options = ["pipeline=async", "pipeline.partial_tokens=1", "train.steps=5"]
    alarm.at = "update"
    stopped = train(small_run(tmp_path / "run", *options, extensions=["alarm"]))
    assert (stopped.status, stopped.step) == ("interrupted", 3)
    assert resume(stopped.directory).step == 5
    assert metrics_of(stopped.directory, "train/position")[-1] == (10,)


@pytest.mark.parametrize("mode", AHEAD)
def test_every_hook_is_called_by_the_thread_of_the_run(small_run, tmp_path, alarm, mode):
    train(small_run(tmp_path / "run", f"pipeline={mode}", extensions=["alarm"]))
    assert sorted(alarm.threads) == ["generate", "score", "step_end", "sync", "update"]
    assert set.union(*alarm.threads.values()) == {threading.get_ident()}


class Halved(Extension[NoOptions]):
    """Halves scores, and writes into every other sample, which is then scored as it is."""

    @hookimpl(wrapper=True)
    def rollstock_generate(self, run, tasks):
        batch = yield
        for row in batch.metadata[::2]:
            row["sample"] = dataclasses.replace(row["sample"], response="")
        return batch

    @hookimpl(wrapper=True)
    def rollstock_score(self, run, batch):
        done = yield
        batch["scores"] = batch.scores / 2
        return done


THREE = '''
"""Says how long a response is, plus three."""
from rollstock import NoOptions, Reward, hookimpl


class Three(Reward[NoOptions]):
    def score(self, sample):
        return len(sample.response) + 3.0


@hookimpl
def rollstock_reward():
    return Three
'''


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), *AHEAD])
def test_wrapped_stages_do_to_a_batch_what_they_do_without_a_pipeline(small_run, tmp_path, installed, mode):
    installed("extension", "halved", Halved)
    installed("reward", "three", THREE)
    run = train(small_run(tmp_path / "run", f"pipeline={mode}", extensions=["halved"], rewards=["three"])).directory
    for rows in trajectories(run).values():
        for place, row in enumerate(map(json.loads, rows.splitlines())):
            assert row["rewards"]["three"] == (3.0 if place % 2 == 0 else len(row["response"]) + 3.0)
            assert row["reward"] == row["rewards"]["three"] / 2


class Own(Extension[NoOptions]):
    """Generates by itself."""

    @hookimpl
    def rollstock_generate(self, run, tasks):
        from rollstock import Batch

        episodes, _ = run.player.play(tasks, samples=2, sampling=run.sampling, seed_of=lambda place, k: place + k)
        return Batch.from_trajectories([episode.trajectory() for episode in episodes])


def test_an_extension_that_generates_by_itself_needs_a_synchronous_run(small_run, tmp_path, installed):
    installed("extension", "own", Own)
    assert train(small_run(tmp_path / "plain", extensions=["own"])).status == "finished"
    with pytest.raises(RunError, match="an extension answered the generate stage itself"):
        train(small_run(tmp_path / "ahead", "pipeline=async", extensions=["own"]))


ASKS = '''
"""Asks twice more, and breaks or waits in a training task of its choice when it is told to."""
import time
from dataclasses import dataclass
from pathlib import Path
from rollstock import Environment, Task, hookimpl, option


@dataclass(kw_only=True)
class AsksConfig:
    breaks: bool = option(False, "whether it breaks")
    waits: str = option("", "a file to write, and then to wait for ever")


class Asks(Environment[AsksConfig]):
    def num_tasks(self, split):
        return None

    def task(self, split, index):
        return Task(id=f"{split} {index}", prompt=f"{index % 10}+")

    def respond(self, task, turns, state):
        state["asked"] = state.get("asked", 0) + 1
        if task.id == "train 3" and self.config.breaks:
            raise ValueError("no answer to this")
        if task.id == "train 3" and self.config.waits:
            Path(self.config.waits).touch()
            while True:
                time.sleep(0.001)
        return "=" if state["asked"] < 3 else None

    def score(self, sample):
        return float(len(sample.turns))


@hookimpl
def rollstock_environment():
    return Asks
'''


TALK = ["sampling.max_new_tokens=8", "sampling.stop=['1','2','3','4','5','6','7','8','9','0','+']"]


@pytest.fixture
def asks(installed):
    installed("environment", "asks", ASKS)


@pytest.mark.parametrize("mode", AHEAD)
def test_conversations_are_played_ahead(small_run, tmp_path, asks, mode):
    partial = ["pipeline.partial_tokens=2"] if mode == "async" else []
    run = train(small_run(tmp_path / "run", f"pipeline={mode}", *TALK, *partial, environment="asks")).directory
    found = metrics_of(run, "rollout/max_turns", "pipeline/staleness_max")
    assert [turns for turns, _ in found] == [3, 3, 3]
    assert [age for _, age in found] == [0, 1, 1]


@pytest.mark.parametrize("mode", AHEAD)
def test_an_environment_that_fails_in_the_other_thread_ends_the_run_with_its_place(small_run, tmp_path, asks, mode):
    breaks = {"name": "asks", "breaks": True}
    with pytest.raises(ValueError, match="no answer to this") as caught:
        train(small_run(tmp_path / "run", f"pipeline={mode}", *TALK, environment=breaks))
    notes = " ".join(caught.value.__notes__)
    assert "environment 'asks' raised this in respond, for task 'train 3'" in notes
    assert "in the generator's thread" in notes
    assert "the run failed in step" in notes


def test_a_second_ctrl_c_waits_for_nobody(small_run, tmp_path, asks):
    sign = tmp_path / "waiting"

    def interrupt() -> None:
        while not sign.exists():
            time.sleep(0.001)
        for _ in range(2):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.1)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    waits = {"name": "asks", "waits": str(sign)}
    outcome = train(small_run(tmp_path / "run", "pipeline=async", *TALK, environment=waits))
    thread.join()
    assert outcome.status == "interrupted"


@pytest.mark.parametrize("mode", AHEAD)
def test_refills_and_greedy_baselines_take_what_is_ahead(small_run, tmp_path, mode):
    dapo = {"name": "dapo", "group_size": 2, "refill_rounds": 2}
    run = train(small_run(tmp_path / "dapo", f"pipeline={mode}", "train.steps=4", algorithm=dapo)).directory
    rounds = [found for (found,) in metrics_of(run, "train/num_rounds")]
    assert max(rounds) > 1
    assert metrics_of(run, "train/position")[-1][0] >= 2 * sum(rounds)
    remax = {"name": "remax"}
    run = train(small_run(tmp_path / "remax", f"pipeline={mode}", algorithm=remax)).directory
    assert all(found is not None for (found,) in metrics_of(run, "greedy/num_responses"))


@pytest.mark.slow
def test_a_double_buffer_with_a_greedy_baseline_repeats_itself(small_run, tmp_path, assert_same_run):
    options = {"algorithm": {"name": "remax"}}
    runs = [
        train(small_run(tmp_path / name, "pipeline=double_buffer", "train.steps=4", **options)).directory
        for name in ("one", "two")
    ]
    assert_same_run(*runs)


def test_a_checkpoint_of_a_run_that_is_ahead_is_evaluated_and_leaves_no_thread(small_run, tmp_path):
    config = small_run(tmp_path / "run", "pipeline=double_buffer", "train.steps=4", "checkpoint.every_steps=1")
    run = train(config).directory
    assert evaluate(run, step=2).evaluation["eval/greedy/num_samples"] == 2


def test_what_is_left_over_at_the_end_is_told(small_run, tmp_path, installed, caplog):
    class Stop(Extension[NoOptions]):
        @hookimpl
        def rollstock_step_end(self, run, step, metrics):
            if step == 2:
                run.stop("enough")

    installed("extension", "stop", Stop)
    caplog.set_level(logging.INFO, logger="rollstock")
    run = train(small_run(tmp_path / "run", "pipeline=async", "train.steps=9", extensions=["stop"])).directory
    assert metrics_of(run, "pipeline/num_in_flight") == [(4,), (4,)]
    assert "4 trajectories that were begun ahead were not trained on" in caplog.text
