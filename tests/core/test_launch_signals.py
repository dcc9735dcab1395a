"""Signals, at each moment of a run: what is written, what is said, and that the resumed run is the uninterrupted one.

They are sent by the run's own process, from a hook, so that each test is the same every time.
"""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollstock import Extension, NoOptions, Scheduler, hookimpl
from rollstock.checkpoint import CheckpointStore
from rollstock.launch import Outcome, resume, train
from rollstock.tasks import TaskSource
from rollstock.testing import installed


class Alarm(Extension[NoOptions]):
    """Counts what it hears, which its checkpoints keep, and sends a signal where it is told to."""

    at: ClassVar[tuple[str, int]] = ("", 0)
    numbers: ClassVar[list[signal.Signals]] = []
    statuses: ClassVar[list[str]] = []

    def __init__(self, config: NoOptions | None = None) -> None:
        super().__init__(config)
        self.heard: dict[str, int] = {}

    @classmethod
    def ring(cls, moment: str, step: int) -> None:
        if (moment, step) == cls.at:
            cls.at = ("", 0)
            for number in cls.numbers:
                signal.raise_signal(number)

    def _hear(self, moment: str, step: int) -> None:
        self.heard[moment] = self.heard.get(moment, 0) + 1
        self.ring(moment, step)

    @hookimpl(wrapper=True)
    def rollstock_generate(self, run, tasks):
        self._hear("generate", run.step)
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_score(self, run, batch):
        self._hear("score", run.step)
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_advantages(self, run, batch):
        self._hear("advantages", run.step)
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_update(self, run, batch):
        self._hear("update", run.step)
        return (yield)

    @hookimpl(wrapper=True)
    def rollstock_sync(self, run):
        done = yield
        if run.step > run.progress.step:  # not the one at the start, of which a resumed run has more
            self._hear("sync", run.step)
        return done

    @hookimpl
    def rollstock_metrics(self, run, step, metrics):
        self._hear("metrics", step)

    @hookimpl
    def rollstock_evaluation_end(self, run, step, metrics):
        self._hear("evaluation_end", step)

    @hookimpl
    def rollstock_step_end(self, run, step, metrics):
        self._hear("step_end", step)

    @hookimpl
    def rollstock_run_end(self, run, status):
        self.statuses.append(status)

    def state(self) -> dict[str, Any]:
        return {"heard": self.heard}

    def load_state(self, state) -> None:
        self.heard = dict(state["heard"])


@pytest.fixture(autouse=True, scope="module")
def alarm(one_thread: None) -> Iterator[None]:
    with installed("extension", "alarm", Alarm):
        yield


@pytest.fixture
def config(small_run):
    def make(directory: Path, *overrides: str) -> Any:
        overrides = ("evaluation.every=2", "checkpoint.every_minutes=0", "checkpoint.keep_best=false", *overrides)
        return small_run(directory, *overrides, extensions=["alarm"])

    return make


@pytest.fixture(scope="module")
def straight(small_run, tmp_path_factory) -> Path:
    """A run that no signal met."""
    overrides = ["evaluation.every=2", "checkpoint.every_minutes=0", "checkpoint.keep_best=false"]
    return train(small_run(tmp_path_factory.mktemp("straight"), *overrides, extensions=["alarm"])).directory


@pytest.fixture
def ring(config, tmp_path):
    """Train until signals come at a moment of a step."""

    def run(moment: str, step: int, *numbers: signal.Signals, overrides: tuple[str, ...] = ()) -> Outcome:
        Alarm.at, Alarm.numbers = (moment, step), list(numbers)
        Alarm.statuses.clear()
        outcome = train(config(tmp_path / "run", *overrides))
        assert Alarm.at == ("", 0), "the moment never came"
        return outcome

    return run


def steps_of(run: Path) -> list[int]:
    return CheckpointStore(run / "checkpoints").steps()


@pytest.mark.parametrize(
    ("moment", "kept"),
    [("generate", 1), ("score", 1), ("advantages", 1), ("update", 2), ("sync", 2), ("metrics", 2), ("step_end", 2)],
)
def test_a_signal_leaves_the_last_finished_step_to_go_on_from(ring, straight, assert_same_run, moment, kept):
    outcome = ring(moment, 2, signal.SIGTERM)
    assert (outcome.status, outcome.step) == ("interrupted", kept)
    assert outcome.message == (
        f"SIGTERM: the newest checkpoint is of step {kept}; go on with: rollstock resume {outcome.directory}"
    )
    assert steps_of(outcome.directory) == [kept]
    assert Alarm.statuses == ["interrupted"]
    assert resume(outcome.directory).status == "finished"
    assert_same_run(outcome.directory, straight)


@pytest.mark.parametrize("step", [2, 3])
def test_a_signal_cuts_an_evaluation_short_which_the_resumed_run_makes_up_for(
    ring, straight, assert_same_run, monkeypatch, step
):
    plain = TaskSource.heldout

    def heldout(self, count):
        Alarm.ring("evaluation", len(calls))
        calls.append(count)
        return plain(self, count)

    calls: list[int] = []
    monkeypatch.setattr(TaskSource, "heldout", heldout)
    outcome = ring("evaluation", step - 1, signal.SIGTERM)  # the first is before step 1, the second after step 2
    assert (outcome.status, outcome.step) == ("interrupted", step)
    assert CheckpointStore(outcome.directory / "checkpoints").load().score is None
    assert resume(outcome.directory).evaluation
    assert_same_run(outcome.directory, straight)


def test_a_signal_during_a_checkpoint_waits_until_it_is_written(ring, straight, assert_same_run, monkeypatch):
    from rollstock.checkpoint import store

    plain = store.write_folder

    def write_folder(folder, content, compression):
        Alarm.ring("checkpoint", content.step)
        plain(folder, content, compression)

    monkeypatch.setattr(store, "write_folder", write_folder)
    outcome = ring("checkpoint", 2, signal.SIGTERM, overrides=("checkpoint.every_steps=1",))
    assert (outcome.status, outcome.step) == ("interrupted", 2)
    assert steps_of(outcome.directory) == [1, 2]
    resume(outcome.directory)
    assert_same_run(outcome.directory, straight)


def test_a_signal_in_the_last_update_leaves_the_last_evaluation_to_the_resumed_run(ring, straight, assert_same_run):
    outcome = ring("update", 3, signal.SIGINT)
    assert (outcome.status, outcome.step, outcome.evaluation) == ("interrupted", 3, {})
    assert resume(outcome.directory).evaluation
    assert_same_run(outcome.directory, straight)


def test_a_signal_when_everything_is_done_changes_nothing(ring, straight, assert_same_run):
    outcome = ring("step_end", 3, signal.SIGINT)
    assert (outcome.status, outcome.step, outcome.message) == ("finished", 3, "")
    assert Alarm.statuses == ["finished"]
    assert_same_run(outcome.directory, straight)


def test_a_second_ctrl_c_ends_at_once_with_the_checkpoint_that_there_is(ring, straight, assert_same_run):
    outcome = ring("update", 3, signal.SIGINT, signal.SIGINT, overrides=("checkpoint.every_steps=1",))
    assert outcome.status == "interrupted"
    assert outcome.message == (
        "SIGINT, again: ended at once; the newest checkpoint is of step 2; go on with: "
        f"rollstock resume {outcome.directory}"
    )
    assert Alarm.statuses == ["interrupted"]
    resume(outcome.directory)
    assert_same_run(outcome.directory, straight)


def test_ctrl_c_while_the_checkpoint_of_the_first_one_is_written_ends_at_once(
    ring, straight, assert_same_run, monkeypatch
):
    from rollstock.checkpoint import store

    plain = store.write_folder

    def write_folder(folder, content, compression):
        plain(folder, content, compression)
        if content.step == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_folder", write_folder)
        patch.setattr("rollstock.run.Run._checkpoint_is_due", lambda run: run.step == 1)
        outcome = ring("score", 3, signal.SIGINT)
    assert outcome.status == "interrupted"
    assert outcome.message.startswith("SIGINT, again: ended at once; the newest checkpoint is of step 1; go on with")
    assert Alarm.statuses == ["interrupted"]
    assert [path.name for path in (outcome.directory / "checkpoints").iterdir() if path.is_dir()] == ["step-000001"]
    resume(outcome.directory)
    assert_same_run(outcome.directory, straight)


def test_a_signal_before_the_first_step_is_finished_is_told_the_way_to_begin_again(ring, straight, assert_same_run):
    outcome = ring("generate", 1, signal.SIGINT)
    assert outcome.message == (
        f"SIGINT: there is no checkpoint yet; begin again with: rollstock resume {outcome.directory}"
    )
    assert resume(outcome.directory).status == "finished"
    assert_same_run(outcome.directory, straight)


class Slow(Scheduler[NoOptions]):
    """Is interrupted while the actor, which makes it, is being built."""

    def __init__(self, config: NoOptions | None = None) -> None:
        super().__init__(config)
        Alarm.ring("build", 0)

    def micro_batches(self, lengths, *, groups=None):
        return None


def test_a_signal_while_the_run_is_built_leaves_the_directory_free(config, tmp_path):
    Alarm.at, Alarm.numbers = ("build", 0), [signal.SIGTERM]
    Alarm.statuses.clear()
    run = tmp_path / "run"
    with installed("scheduler", "slow", Slow):
        outcome = train(config(run, "scheduler={name: slow}"))
        assert (outcome.status, outcome.step) == ("interrupted", 0)
        assert outcome.message == "SIGTERM: ended before anything was trained; nothing was written"
        assert not run.exists()
        assert Alarm.statuses == []  # it had not started
        assert train(config(run, "scheduler={name: slow}", "train.steps=1")).status == "finished"


def test_a_signal_while_a_resumed_run_is_built_changes_nothing(config, tmp_path):
    run = tmp_path / "run"
    with installed("scheduler", "slow", Slow):
        train(config(run, "scheduler={name: slow}", "train.steps=2", "checkpoint.every_steps=1"))
        before = (run / "metrics.jsonl").read_bytes()
        Alarm.at, Alarm.numbers = ("build", 0), [signal.SIGINT]
        outcome = resume(run, step=1)
    assert outcome.message == f"SIGINT: ended before anything was trained; go on with: rollstock resume {run}"
    assert (run / "metrics.jsonl").read_bytes() == before


def test_the_handlers_of_before_are_put_back(ring):
    def mine(number, frame):
        raise AssertionError("never called")

    kept = {number: signal.signal(number, mine) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ring("update", 1, signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_the_log_does_not_call_an_interrupted_run_a_failed_one(ring, caplog):
    caplog.set_level(logging.INFO, logger="rollstock")
    outcome = ring("score", 2, signal.SIGINT)
    assert "failed" not in (outcome.directory / "logs" / "controller.log").read_text()
