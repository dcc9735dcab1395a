"""Faults of plugins, met by a whole run: who raised is named, what was finished stays, and what can go on does."""

import logging
from pathlib import Path
from typing import ClassVar

import pytest

from rollstock import Algorithm, Extension, Metric, NoOptions, Tracker, UserError, hookimpl
from rollstock.checkpoint import CheckpointStore
from rollstock.launch import resume, train
from rollstock.rundir import RunDirectory
from rollstock.testing import installed, read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


def log_of(run: Path) -> str:
    return (run / "logs" / "controller.log").read_text()


class Breaks(Tracker[NoOptions]):
    """Breaks in step 2, and remembers what it was given."""

    started: ClassVar[list[dict[str, int]]] = []
    seen: ClassVar[list[int]] = []

    def start(self, run, state):
        self.started.append(dict(state))

    def log(self, step, metrics):
        if step == 2:
            raise OSError("the server is gone")
        self.seen.append(step)

    def state(self):
        return {"seen": self.seen[-1] if self.seen else 0}


def test_a_tracker_that_breaks_is_left_out_counted_and_takes_its_place_again_when_resumed(small_run, tmp_path):
    run = tmp_path / "run"
    Breaks.started.clear()
    Breaks.seen.clear()
    with installed("tracker", "breaks", Breaks):
        config = small_run(run, "checkpoint.every_steps=1", trackers=["breaks", "jsonl"])
        assert train(config).status == "finished"
        steps = [row["metrics"] for row in read_metrics(run) if "metrics" in row]
        assert [metrics["tracker/num_failed"] for metrics in steps] == [0, 0, 1]
        assert "tracker 'breaks' failed and gets nothing more in this run: the server is gone" in log_of(run)
        assert Breaks.seen == [1]
        assert CheckpointStore(run / "checkpoints").load().state["trackers"]["breaks"] == {"seen": 1}
        resume(run, step=2)
    assert Breaks.started == [{}, {"seen": 1}]
    assert Breaks.seen == [1, 3]


class Refuses(Tracker[NoOptions]):
    """Cannot start."""

    def start(self, run, state):
        raise UserError("no account is set up")

    def log(self, step, metrics):
        raise AssertionError("it has not started")


def test_a_tracker_that_cannot_start_ends_the_run_before_its_first_step(small_run, tmp_path):
    run = tmp_path / "run"
    with installed("tracker", "refuses", Refuses), pytest.raises(UserError, match="no account") as caught:
        train(small_run(run, trackers=["jsonl", "refuses"]))
    assert caught.value.__notes__ == [
        "tracker 'refuses' could not start",
        "the run failed before its first step; nothing was trained yet; once that is mended, begin anew: rollstock "
        "train CONFIG --overwrite",
    ]
    assert read_metrics(run) == []


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_what_fails_at_the_end_never_hides_what_failed_before(small_run, tmp_path, caplog, ends):
    class Clumsy(Extension[NoOptions]):
        @hookimpl
        def rollstock_step_end(self, run, step, metrics):
            if ends == "badly":
                raise ValueError("first")

        @hookimpl
        def rollstock_run_end(self, run, status):
            raise ValueError("second")

    run = tmp_path / "run"
    with installed("extension", "clumsy", Clumsy), pytest.raises(ValueError, match="first|second") as caught:
        train(small_run(run, "train.steps=1", extensions=["clumsy"]))
    assert str(caught.value) == ("second" if ends == "well" else "first")
    hook = "rollstock_run_end" if ends == "well" else "rollstock_step_end"
    assert f"raised by the hook {hook} of plugin extension:clumsy/instance" in caught.value.__notes__
    assert "the hook rollstock_run_end failed at the end of the run: second" in caplog.text
    RunDirectory(run).lock()  # everything else was closed all the same


FAILING = '''
"""An environment with a fault of its own."""
from rollstock import Environment, NoOptions, Task, UserError, hookimpl

class Failing(Environment[NoOptions]):
    def num_tasks(self, split):
        return None

    def task(self, split, index):
        if split == "train" and index == 3:
            raise {error}
        return Task(id=f"{{split}}-{{index}}", prompt="1+1=", answer=2)

    def score(self, sample):
        return 1.0

@hookimpl
def rollstock_environment():
    return Failing
'''


@pytest.mark.parametrize(("error", "code"), [("KeyError('no row')", 1), ("UserError('row 3 is broken')", 2)])
def test_an_environment_that_raises_is_named_with_the_task(small_run, tmp_path, caplog, error, code):
    run = tmp_path / "run"
    source = FAILING.format(error=error)
    with installed("environment", "failing", source), pytest.raises((KeyError, UserError)) as caught:
        train(small_run(run, "checkpoint.every_steps=1", environment={"name": "failing"}))
    assert getattr(caught.value, "exit_code", 1) == code
    assert "environment 'failing' raised this in task('train', 3)" in caught.value.__notes__
    assert caught.value.__notes__[-1].startswith("the run failed in step 2; the newest checkpoint is of step 1;")
    assert "row" in log_of(run)


def test_steps_whose_prompts_are_all_skipped_are_counted_and_harmless(small_run, tmp_path):
    run = tmp_path / "run"
    overrides = ["sampling.max_prompt_tokens=1", "sampling.overlong_prompt=skip", "evaluation.at_start=false"]
    outcome = train(small_run(run, *overrides))
    assert outcome.evaluation == {"eval/greedy/num_samples": 0.0, "eval/greedy/num_unscored": 0.0}
    steps = [row["metrics"] for row in read_metrics(run) if "metrics" in row]
    assert [m["train/num_empty_steps"] for m in steps] == [1, 1, 1]
    assert [m["prompt_length/num_skipped"] for m in steps] == [2, 2, 2]
    assert [m["perf/total_num_tokens"] for m in steps] == [0, 0, 0]
    assert [m["train/position"] for m in steps] == [2, 4, 6]
    assert (run / "rollouts" / "step-000001.jsonl").read_bytes() == b""


def test_a_round_in_which_all_prompts_were_skipped_joins_the_next(small_run, tmp_path):
    class Picky(Algorithm[NoOptions]):
        refill_rounds = 2

        def advantages(self, batch):
            return batch.scores[:, None] * batch.mask

        def loss(self, micro):
            return micro.loss(-micro.advantages * micro.logprobs)

    source = """
from rollstock import Environment, NoOptions, Task, hookimpl

class Uneven(Environment[NoOptions]):
    def num_tasks(self, split):
        return None

    def task(self, split, index):
        return Task(id=str(index), prompt="1" * (9 if index < 2 else 3), answer=2)

    def score(self, sample):
        return float(sample.num_tokens)

@hookimpl
def rollstock_environment():
    return Uneven
"""
    run = tmp_path / "run"
    limits = {"max_new_tokens": 2, "max_prompt_tokens": 4, "overlong_prompt": "skip"}
    sections = {"algorithm": {"name": "picky"}, "environment": {"name": "uneven"}, "sampling": limits}
    with installed("algorithm", "picky", Picky), installed("environment", "uneven", source):
        train(small_run(run, "train.steps=1", **sections))
    (metrics,) = [row["metrics"] for row in read_metrics(run) if "metrics" in row]
    assert metrics["prompt_length/num_skipped"] == 2
    assert metrics["train/num_trajectories"] == 2
    assert metrics["train/num_empty_steps"] == 0
    assert metrics["train/position"] == 4


def test_throughput_counts_what_was_generated_dropped_or_not(small_run, tmp_path):
    class Half(Extension[NoOptions]):
        @hookimpl
        def rollstock_select(self, run, batch):
            return batch.select(range(len(batch) // 2))

        @hookimpl
        def rollstock_metrics(self, run, step, metrics):
            metrics["mine/prompt"] = Metric(metrics["prompt_length/mean"].value)

    with installed("extension", "half", Half):
        run = train(small_run(tmp_path / "run", "train.steps=1", extensions=["half"])).directory
    (metrics,) = [row["metrics"] for row in read_metrics(run) if "metrics" in row]
    assert metrics["train/num_trajectories"] == 2
    per_trajectory = metrics["mine/prompt"] + metrics["response_length/mean"]
    assert metrics["perf/total_num_tokens"] == pytest.approx(4 * per_trajectory)
    assert metrics["perf/throughput"] == pytest.approx(metrics["perf/total_num_tokens"] / metrics["timing_s/step"])


def test_a_run_may_be_stopped_by_whoever_listens(small_run, tmp_path, caplog):
    class Enough(Extension[NoOptions]):
        @hookimpl
        def rollstock_step_end(self, run, step, metrics):
            if step == 2:
                run.stop("that is enough")

    caplog.set_level(logging.INFO, logger="rollstock")
    with installed("extension", "enough", Enough):
        outcome = train(small_run(tmp_path / "run", extensions=["enough"]))
    assert (outcome.status, outcome.step) == ("finished", 2)
    assert outcome.evaluation
    assert "stopped after step 2: that is enough" in caplog.text
    checkpoint = CheckpointStore(outcome.directory / "checkpoints").load()
    assert (checkpoint.step, checkpoint.score) == (2, outcome.evaluation["eval/greedy/reward_mean"])


def test_a_run_stopped_by_its_last_hook_is_evaluated_and_saved_too(small_run, tmp_path):
    class Enough(Extension[NoOptions]):
        @hookimpl
        def rollstock_checkpoint_saved(self, run, step, path):
            run.stop("saved once")

    with installed("extension", "enough", Enough):
        outcome = train(small_run(tmp_path / "run", "checkpoint.every_steps=1", extensions=["enough"]))
    assert outcome.step == 1
    assert CheckpointStore(outcome.directory / "checkpoints").load().score is not None


def test_held_out_tasks_that_do_not_exist_are_noticed_before_the_run(small_run, tmp_path):
    source = FAILING.format(error="KeyError()").replace("return None", "return 3 if split == 'train' else 0", 1)
    run = tmp_path / "run"
    with installed("environment", "failing", source):
        with pytest.raises(UserError, match=r"environment 'failing' has no heldout tasks; .*at_end: false"):
            train(small_run(run, "evaluation.at_start=false", environment={"name": "failing"}))
        assert not run.exists()
        off = ["evaluation.at_start=false", "evaluation.at_end=false", "train.steps=1"]
        assert train(small_run(run, *off, environment={"name": "failing"})).evaluation == {}


# Rewards (what a reward does wrong costs its sample, and never the run)


WORLD = '''
"""Four tasks, and a reward that does a different thing for each."""
import time
from rollstock import Environment, NoOptions, Reward, Task, hookimpl

class World(Environment[NoOptions]):
    def num_tasks(self, split):
        return 5

    def task(self, split, index):
        kind = ("hangs", "raises", "abstains", "is fine", "is infinite")[index]
        return Task(id=f"{split} {kind}", prompt="1+1=", answer=kind)

@hookimpl
def rollstock_environment():
    return World
'''
MOODY = '''
"""A reward that does a different thing for each task."""
import time
from rollstock import NoOptions, Reward, hookimpl

class Moody(Reward[NoOptions]):
    def score(self, sample):
        match sample.task.answer:
            case "hangs":
                while True:
                    try:
                        time.sleep(60)
                    except BaseException:  # whatever is raised into it, it goes on
                        pass
            case "raises":
                raise ValueError(f"cannot judge {sample.response!r}")
            case "abstains":
                return None
            case "is infinite":
                return float("inf")
        return 1.0

@hookimpl
def rollstock_reward():
    return Moody
'''


def test_a_reward_that_hangs_raises_or_abstains_is_counted_and_named_and_the_run_goes_on(small_run, tmp_path):
    run = tmp_path / "run"
    sections = {
        "environment": {"name": "world"},
        "rewards": ["moody"],
        "reward_limits": {"timeout_s": 1.0, "workers": 2},
        "train": {"steps": 2, "prompts_per_step": 5},
        "evaluation": {"at_start": False, "at_end": False},
    }
    with installed("environment", "world", WORLD), installed("reward", "moody", MOODY):
        assert train(small_run(run, **sections)).status == "finished"
    for row in read_metrics(run):
        metrics = row["metrics"]
        assert metrics["reward/num_timed_out"] == 2
        assert metrics["reward/num_raised"] == 4
        assert metrics["reward/num_abstained"] == 2
        assert metrics["reward/num_unscored"] == 8
        assert metrics["train/num_dropped"] == 8
        assert metrics["train/num_trajectories"] == 2
        assert (metrics["reward/mean"], metrics["train/num_empty_steps"]) == (1.0, 0.0)
    log = log_of(run)
    named = "rewards: reward 'moody' of task 'train {}' (step 1)"
    ended = "no answer within 1 s; its process was ended"
    assert log.count(f"{named.format('hangs')} timed out: {ended}") == 1
    assert log.count(f"{named.format('raises')} raised: ValueError: cannot judge") == 1
    assert log.count(f"{named.format('is infinite')} raised: ValueError: reward 'moody' returned inf") == 1
    for times in ("once more (step 1)", "2 more times (step 2)"):
        for verb, reason, mood in (
            ("timed out", ended, "hangs"),
            ("raised", "ValueError", "raises"),
            ("raised", "ValueError", "is infinite"),
        ):
            told = f"task 'train {mood}' (step 1): task 'train {mood}'"
            assert log.count(f"rewards: reward 'moody' {verb} {times}, with {reason} as told of {told}\n") == 1
    assert log.count("Traceback") == 2
    assert "train abstains" not in log
