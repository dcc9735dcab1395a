"""The run directory is made, locked, refused when occupied, and overwritten only when told to."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rollstock.errors import UserError
from rollstock.lockfile import LockedError
from rollstock.rundir import OccupiedError, RunDirectory, log_to_file, stop_logging
from rollstock.secrets import MASK


def finished_run(path: Path, *, checkpoint: bool = True) -> RunDirectory:
    run = RunDirectory.create(path)
    run.config.write_text("run: {}\n")
    run.manifest.write_text("{}")
    run.metrics.write_text('{"step": 1}\n')
    if checkpoint:
        (run.checkpoints / "step-000010").mkdir()
    run.unlock()
    return run


def test_a_new_directory_has_its_folders_and_an_empty_one_is_fine(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    run = RunDirectory.create(tmp_path / "runs" / "a")
    assert sorted(run.occupants()) == ["checkpoints", "logs", "rollouts"]


def test_an_occupied_directory_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    finished_run(tmp_path / "a")
    with pytest.raises(OccupiedError) as caught:
        RunDirectory.create(tmp_path / "a")
    message = str(caught.value)
    assert "checkpoint of step 10" in message
    for way_out in (f"rollstock resume {tmp_path / 'a'}", "run.directory=", "--overwrite"):
        assert way_out in message


def test_resume_is_not_offered_where_it_cannot_work(tmp_path: Path) -> None:
    finished_run(tmp_path / "a", checkpoint=False)
    with pytest.raises(OccupiedError, match="without a checkpoint") as caught:
        RunDirectory.create(tmp_path / "a")
    assert "rollstock resume" not in str(caught.value)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_is_no_run_is_never_touched(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OccupiedError, match=r"thesis\.tex"):
        RunDirectory.create(tmp_path, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_another_projects_directory_with_a_config_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("title: My site\n")
    (tmp_path / "logs").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for overwrite in (False, True):
        with pytest.raises(OccupiedError, match=r"config\.yaml, logs\) and holds no run, so it is left alone"):
            RunDirectory.create(tmp_path, overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before


def test_overwrite_removes_the_old_run_aloud_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = finished_run(tmp_path / "a")
    (old.path / "notes.md").write_text("mine")
    with caplog.at_level(logging.WARNING):
        new = RunDirectory.create(tmp_path / "a", overwrite=True)
    assert "checkpoint of step 10" in caplog.text
    assert new.checkpoint_steps() == []
    assert not new.metrics.exists()
    assert (new.path / "notes.md").read_text() == "mine"


def test_a_run_in_progress_is_not_even_overwritten(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rollstock.rundir import RunDirectory\n"
        "run = RunDirectory.create(Path(sys.argv[1])); run.config.touch(); print('up', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        with pytest.raises(LockedError, match=f"process {other.pid}"):
            RunDirectory.create(tmp_path / "a", overwrite=True)
        other.kill()


def test_whether_a_directory_is_free_can_be_asked_without_touching_it(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "new").check_free()
    assert not (tmp_path / "new").exists()
    old = finished_run(tmp_path / "a")
    with pytest.raises(OccupiedError, match="checkpoint of step 10"):
        RunDirectory(old.path).check_free()
    with pytest.raises(OccupiedError, match="is a file"):
        RunDirectory(old.config).check_free()


def test_a_refusal_gives_the_lock_back(tmp_path: Path) -> None:
    finished_run(tmp_path / "a")
    for _ in range(2):
        with pytest.raises(OccupiedError):
            RunDirectory.create(tmp_path / "a")


def test_a_reserved_directory_that_comes_to_nothing_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for place in ("runs/deep/a", "there", "there/b"):
        with RunDirectory.reserve(tmp_path / place).locked():
            assert (tmp_path / place / ".lock").is_file()
        assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
    with pytest.raises(UserError, match="cannot be made"):
        RunDirectory.reserve(tmp_path / "there" / "deep" / ("long" * 100))
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_what_was_there_before_a_reservation_stays(tmp_path: Path) -> None:
    old = finished_run(tmp_path / "a")
    before = sorted(tmp_path.rglob("*"))
    RunDirectory.reserve(old.path, overwrite=True).unlock()
    with pytest.raises(OccupiedError):
        RunDirectory.reserve(old.path)
    assert sorted(tmp_path.rglob("*")) == before
    with RunDirectory.reserve(tmp_path / "b").locked() as other:
        (other.path / "notes.md").write_text("written meanwhile")
    assert (tmp_path / "b" / "notes.md").exists()


def test_a_file_in_the_way_and_a_forbidden_place_are_clear_errors(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(OccupiedError, match="is a file"):
        RunDirectory.create(tmp_path / "a")
    with pytest.raises(UserError, match="cannot be made"):
        RunDirectory.create(tmp_path / "a" / "b")


@pytest.mark.skipif(sys.platform != "linux", reason="uses folders of the kernel, where nobody may write, root included")
@pytest.mark.parametrize(("place", "done"), [("/proc/rollstock", "made"), ("/sys/kernel", "written")])
def test_a_place_where_nobody_may_write_is_the_users_to_change(place: str, done: str) -> None:
    with pytest.raises(UserError, match=rf"{place} cannot be {done}: .*; choose another with run\.directory=DIR"):
        RunDirectory.reserve(Path(place))


def test_opening_what_is_no_run_names_runs_near_it(tmp_path: Path) -> None:
    finished_run(tmp_path / "first")
    assert RunDirectory.open(tmp_path / "first").is_run()
    with pytest.raises(UserError, match=rf"does not exist\. Runs near it: {tmp_path / 'first'}"):
        RunDirectory.open(tmp_path / "frist")
    with pytest.raises(UserError, match=r"holds no run .*first"):
        RunDirectory.open(tmp_path)
    with pytest.raises(UserError, match="rollstock train"):
        RunDirectory.open(tmp_path / "no" / "where")


def test_a_config_alone_is_no_run_and_a_lost_manifest_is_no_obstacle(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "config.yaml").write_text("title: My site\n")
    with pytest.raises(UserError, match=r"holds no run \(it has no manifest\.json or metrics\.jsonl beside its config"):
        RunDirectory.open(site)
    with pytest.raises(UserError) as caught:
        RunDirectory.open(tmp_path / "sight")
    assert "Runs near it" not in str(caught.value)
    run = finished_run(tmp_path / "a")
    run.manifest.unlink()
    assert RunDirectory.open(run.path).is_run()


def test_the_log_file_takes_records_and_warnings_and_masks_secrets(tmp_path: Path) -> None:
    levels = [logging.getLogger(name).level for name in ("rollstock", "py.warnings")]
    handler = log_to_file(tmp_path / "logs" / "controller.log")
    try:
        logging.getLogger("rollstock.anything").info("key %s", "hf_abcdefghijklmnopqrst")
        logging.getLogger("rollstock.anything").debug("too small to mention")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("mind the gap", UserWarning, stacklevel=1)
    finally:
        stop_logging(handler)
    logging.getLogger("rollstock.anything").info("after the end")
    with pytest.warns(UserWarning, match="not for the log"):
        warnings.warn("not for the log", UserWarning, stacklevel=1)
    assert [logging.getLogger(name).level for name in ("rollstock", "py.warnings")] == levels
    text = (tmp_path / "logs" / "controller.log").read_text()
    assert f"key {MASK}" in text
    assert "mind the gap" in text
    assert "too small" not in text
    assert "after the end" not in text
    assert "not for the log" not in text
