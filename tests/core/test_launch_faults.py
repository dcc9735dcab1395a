"""Faults around a run: full disks, damaged checkpoints, directories in use, starts that fail, a plugin that is gone."""

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from rollstock import Algorithm, Extension, NoOptions, PluginError, RunError, UserError, hookimpl
from rollstock.checkpoint import CheckpointStore, DiskFullError
from rollstock.cli import main
from rollstock.launch import resume, train
from rollstock.lockfile import LockedError
from rollstock.rundir import OccupiedError, RunDirectory
from rollstock.testing import installed, read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(run, straight, assert_same_run, capsys):
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


def test_when_every_checkpoint_is_damaged_the_run_is_not_begun_anew_in_silence(run, capsys):
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
    assert run.exists() is occupied
    assert train(small_run(run, "train.steps=1"), overwrite=occupied).status == "finished"


def test_a_manifest_that_cannot_be_made_costs_nothing_either(small_run, run, monkeypatch):
    def git_hangs(**_facts):
        raise TimeoutError("git does not answer")

    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    monkeypatch.setattr("rollstock.launch.build_manifest", git_hangs)
    with pytest.raises(TimeoutError):
        train(small_run(run), overwrite=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == before
    RunDirectory(run).lock()


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


def test_a_run_whose_plugin_is_gone_says_which_one(small_run, tmp_path, capsys):
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
