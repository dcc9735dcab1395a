"""The JSON lines of a run, and that a resumed run's are those of an uninterrupted one."""

import json
import math

import pytest

from rollstock import RunError
from rollstock.plugins.trackers.jsonl import JsonlConfig, JsonlTracker


def started(info, state=None, **options):
    tracker = JsonlTracker(JsonlConfig(**options))
    tracker.start(info, state or {})
    return tracker


def play(tracker, steps, rows):
    """Record steps in the order in which the core does."""
    for step in steps:
        tracker.samples(step, rows(step))
        tracker.log(step, {"actor/loss": 0.1 * step, "reward/mean": 1.0})
        if step % 2 == 0:
            tracker.evaluation(step, {"eval/greedy/solved": step / 10})


def contents(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_one_object_a_step_an_evaluation_and_a_trajectory(info, rows, tmp_path):
    tracker = started(info())
    play(tracker, [1, 2], rows)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "metrics": {"actor/loss": 0.1, "reward/mean": 1.0}},
        {"step": 2, "metrics": {"actor/loss": 0.2, "reward/mean": 1.0}},
        {"step": 2, "evaluation": {"eval/greedy/solved": 0.2}},
    ]
    found = [json.loads(line) for line in (tmp_path / "rollouts" / "step-000002.jsonl").read_text().splitlines()]
    assert found == rows(2)


@pytest.mark.parametrize("killed_after", [3, 4, 5])
def test_a_resumed_run_leaves_the_files_of_an_uninterrupted_one(info, rows, tmp_path, killed_after):
    tracker = started(info())
    play(tracker, range(1, 7), rows)
    tracker.finish("finished")
    whole = contents(tmp_path)

    tracker = started(info())
    play(tracker, range(1, 4), rows)
    state = json.loads(json.dumps(tracker.state()))
    play(tracker, range(4, killed_after + 1), rows)
    # Killed in the middle of the next step: its trajectories are there, of its metrics half a line.
    tracker.samples(killed_after + 1, rows(killed_after + 1))
    (tmp_path / "rollouts" / "step-000009.jsonl.part").write_text("{")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "met')

    tracker = started(info(resumed_at=3), state)
    assert not (tmp_path / "rollouts" / "step-000004.jsonl").exists()
    play(tracker, range(4, 7), rows)
    tracker.finish("finished")
    assert contents(tmp_path) == whole


def test_without_a_position_the_steps_in_the_lines_decide(info, rows, tmp_path):
    tracker = started(info())
    play(tracker, range(1, 6), rows)
    tracker.finish("interrupted")
    started(info(resumed_at=4)).finish("finished")
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 2, 3, 4, 4]


def test_a_file_that_lost_its_end_is_reported_and_cut_at_a_whole_line(info, rows, tmp_path, caplog):
    tracker = started(info())
    play(tracker, range(1, 4), rows)
    state = tracker.state()
    tracker.finish("interrupted")
    with (tmp_path / "metrics.jsonl").open("r+b") as file:
        file.truncate(state["position"] - 5)
    tracker = started(info(resumed_at=3), state)
    tracker.log(4, {})
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 2, 4]
    assert "is shorter than at the checkpoint" in caplog.text


def test_a_tracker_that_is_new_at_a_resume_starts_an_empty_file(info, tmp_path):
    tracker = started(info(resumed_at=3))
    tracker.log(4, {"a": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 4, "metrics": {"a": 1.0}}\n'


def test_lines_are_readable_at_once_and_numbers_valid_json(info, rows, tmp_path):
    tracker = started(info())
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": 1e-300})
    tracker.samples(1, [{"response": "\ud800 \u00fc", "reward": math.nan}])
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["metrics"] == {"a": None, "b": None, "c": 1e-300}
    row = json.loads((tmp_path / "rollouts" / "step-000001.jsonl").read_text())
    assert row == {"response": "? \u00fc", "reward": None}


def test_trajectories_of_some_steps_or_of_none(info, rows, tmp_path):
    play(started(info(), rollouts_every=2), range(1, 6), rows)
    assert [p.name for p in sorted((tmp_path / "rollouts").iterdir())] == ["step-000002.jsonl", "step-000004.jsonl"]
    play(started(info(), rollouts=False), range(1, 6), rows)
    assert list((tmp_path / "rollouts").iterdir()) == []


def test_use_after_the_end_is_an_error_and_a_second_end_is_not(info):
    tracker = started(info())
    tracker.finish("finished")
    tracker.finish("finished")
    with pytest.raises(RunError, match="after `finish`"):
        tracker.log(1, {})
