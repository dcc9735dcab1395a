"""What can go wrong in the middle of a run: full disks, damaged checkpoints, plugins that raise, broken trackers."""

import logging
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from rollstock import Algorithm, Extension, Metric, NoOptions, PluginError, RunError, Tracker, UserError, hookimpl
from rollstock.checkpoint import CheckpointStore, DiskFullError
from rollstock.cli import main
from rollstock.launch import resume, train
from rollstock.lockfile import LockedError
from rollstock.rundir import OccupiedError, RunDirectory
from rollstock.testing import installed, read_metrics


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def straight(small_run, tmp_path_factory) -> Path:
    """A run of three steps with a checkpoint after each, for which nothing went wrong."""
    return train(small_run(tmp_path_factory.mktemp("straight"), "checkpoint.every_steps=1")).directory


@pytest.fixture
def run(straight, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(straight, tmp_path / "run")


def log_of(run: Path) -> str:
    return (run / "logs" / "controller.log").read_text()


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def damage(path: Path) -> None:
    """Flip a byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


# Disks and checkpoints


class Cramped(Extension[NoOptions]):
    """From the end of step 2 on, no file may grow over 20 kB."""

    @hookimpl
    def rollstock_step_end(self, run, step, metrics):
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def roomy_again() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_ends_the_run_and_the_older_checkpoint_is_good(
    small_run, tmp_path, straight, assert_same_run, roomy_again
):
    run = tmp_path / "run"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with installed("extension", "cramped", Cramped), pytest.raises(DiskFullError) as caught:
        train(small_run(run, "checkpoint.every_steps=1", extensions=["cramped"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value, RunError)  # exit code 1
    assert "no room for the checkpoint of step 2" in str(caught.value)
    assert caught.value.__notes__[-1] == (
        f"the run failed in step 2; the newest checkpoint is of step 1; go on with: rollstock resume {run}"
    )
    assert CheckpointStore(run / "checkpoints").steps() == [1]
    assert "no room for the checkpoint" in log_of(run)
    with installed("extension", "cramped", type("Roomy", (Extension,), {"rollstock_step_end": _nothing})):
        assert resume(run).status == "finished"
    assert [row["step"] for row in read_metrics(run)] == [row["step"] for row in read_metrics(straight)]
    state = CheckpointStore(run / "checkpoints").load()
    whole = CheckpointStore(straight / "checkpoints").load()
    assert all(
        torch.equal(tensor, whole.tensors[part][name])
        for part in state.tensors
        for name, tensor in state.tensors[part].items()
    )


@hookimpl
def _nothing(self, run, step, metrics):
    """Hear the hook, and leave everything as it is."""


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(run, straight, assert_same_run, capsys, keep_logging):
    damage(next(newest(run).glob("*.zst")))
    assert main(["resume", str(run)]) == 0
    said = capsys.readouterr().err
    for text in (said, log_of(run)):
        assert "passed over a damaged checkpoint" in text
        assert "step-000003" in text
        assert "chose the older checkpoint of step 2" in text
    assert_same_run(run, straight)


def test_a_half_written_checkpoint_is_never_chosen(run, straight, assert_same_run):
    cut = newest(run)
    half = cut.with_name(f".tmp-{cut.name}-4711")
    cut.rename(half)
    for path in sorted(half.iterdir())[1:]:
        path.unlink()
    assert resume(run).status == "finished"
    assert not half.exists()
    assert f"removed {half}, left by a process that was killed" in log_of(run)
    assert_same_run(run, straight)


def test_a_checkpoint_whose_last_file_is_missing_is_passed_over(run, straight, assert_same_run):
    (newest(run) / "manifest.json.sha256").unlink()
    assert resume(run).status == "finished"
    assert "chose the older checkpoint of step 2" in log_of(run)
    assert_same_run(run, straight)


def test_when_every_checkpoint_is_damaged_the_run_is_not_begun_anew_in_silence(run, capsys, keep_logging):
    for folder in (run / "checkpoints").glob("step-*"):
        damage(next(folder.glob("*.zst")))
    before = (run / "metrics.jsonl").read_bytes()
    assert main(["resume", str(run)]) == 1
    assert "step-000003" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_step_without_a_checkpoint_is_refused_with_those_that_have_one(run):
    with pytest.raises(UserError, match=r"no checkpoint of step 9; steps there: 1, 2, 3"):
        resume(run, step=9)
    RunDirectory(run).lock()  # the refused start let go of it


# Directories


def test_an_occupied_directory_is_refused_and_left_as_it_is(small_run, run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(OccupiedError, match=r"--overwrite"):
        train(small_run(run))
    with pytest.raises(OccupiedError, match=r"--overwrite"):
        train(small_run(run), dry_run=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_in_use_can_be_neither_resumed_nor_overwritten(small_run, run):
    holder = RunDirectory(run)
    holder.lock()
    try:
        with pytest.raises(LockedError, match="is in use by"):
            resume(run, step=1)
        with pytest.raises(LockedError, match="is in use by"):
            train(small_run(run), overwrite=True)
    finally:
        holder.unlock()
    assert resume(run, step=2).status == "finished"


class Unable(Algorithm[NoOptions]):
    """Fails when the actor makes its own: when the run is being built."""

    made: ClassVar[int] = 0

    def __init__(self, config: NoOptions | None = None) -> None:
        super().__init__(config)
        Unable.made += 1
        if Unable.made > 1:
            raise MemoryError("the model does not fit")

    def advantages(self, batch):
        return batch.scores[:, None] * batch.mask

    def loss(self, micro):
        return micro.loss(-micro.advantages * micro.logprobs)


@pytest.mark.parametrize("occupied", [False, True])
def test_a_start_that_fails_costs_nothing(small_run, tmp_path, straight, occupied):
    run = tmp_path / "run"
    if occupied:
        shutil.copytree(straight, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    Unable.made = 0
    with installed("algorithm", "unable", Unable), pytest.raises(PluginError, match="the model does not fit"):
        train(small_run(run, algorithm={"name": "unable"}), overwrite=occupied)
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before
    assert train(small_run(run, "train.steps=1"), overwrite=occupied).status == "finished"


def test_overwriting_removes_what_was_there(small_run, run):
    assert train(small_run(run, "train.steps=1"), overwrite=True).step == 1
    assert CheckpointStore(run / "checkpoints").steps() == [1]
    assert [row["step"] for row in read_metrics(run)] == [0, 1, 1]


def test_a_dry_run_makes_everything_and_writes_nothing(small_run, tmp_path):
    with installed("extension", "listener", Listener):
        Listener.heard.clear()
        outcome = train(small_run(tmp_path / "run", extensions=["listener"]), dry_run=True)
    assert (outcome.status, outcome.step) == ("checked", 0)
    assert list(tmp_path.iterdir()) == []
    assert Listener.heard == []


class Listener(Extension[NoOptions]):
    """Remembers how runs began and ended."""

    heard: ClassVar[list[str]] = []

    @hookimpl
    def rollstock_run_start(self, run):
        self.heard.append("start")

    @hookimpl
    def rollstock_run_end(self, run, status):
        self.heard.append(status)


# Plugins


def test_a_run_whose_plugin_is_gone_says_which_one(small_run, tmp_path, capsys, keep_logging):
    run = tmp_path / "run"
    with installed("extension", "listener", Listener):
        train(small_run(run, "train.steps=2", "checkpoint.every_steps=1", extensions=["listener"]))
        shutil.rmtree(run / "checkpoints" / "step-000002")
    assert main(["resume", str(run)]) == 2
    message = capsys.readouterr().err
    assert "there is no extension 'listener'" in message
    assert "config.yaml" in message
    with installed("extension", "listener", Listener):
        assert resume(run).status == "finished"  # it was not left locked, and nothing was lost


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
        "the run failed in step 0; nothing was trained yet; once that is mended, begin anew: rollstock train CONFIG "
        "--overwrite",
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
    for step in (1, 2):
        named = f"rewards: reward 'moody' of task 'train {{}}' (step {step})"
        assert log.count(f"{named.format('hangs')} timed out: no answer within 1 s; its process was ended") == 2
        assert log.count(f"{named.format('raises')} raised: ValueError: cannot judge") == 2
        assert log.count(f"{named.format('is infinite')} raised: ValueError: reward 'moody' returned inf") == 2
        assert named.format("abstains") not in log
