"""A profile of a run: what it measures, what it writes, and that the run is the same with it."""

import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstock import UserError
from rollstock.cli import main
from rollstock.launch import resume, train
from rollstock.profile import ProfileSettings, capture, parse_steps
from rollstock.profile.capture import OUTSIDE_OF_OPERATORS, Capture, Operator
from rollstock.profile.spans import ELSEWHERE, Spans, covered
from rollstock.profile.table import BETWEEN, as_text, summarise, tables
from rollstock.testing import read_metrics

STAGES = ["generate", "score", "select", "prepare", "advantages", "update", "sync", "finish"]


@pytest.mark.parametrize(("text", "steps"), [("3", (3, 3)), ("2-3", (2, 3)), (" 4-4 ", (4, 4))])
def test_steps_are_one_or_a_range(text: str, steps: tuple[int, int]) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", "x", "0", "3-2", "1-", "-1", "1,2", "1.5"])
def test_what_is_no_range_of_steps_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--profile-steps"):
        parse_steps(text)


def test_the_second_step_is_profiled_unless_another_is_named() -> None:
    assert ProfileSettings().chosen(0, 5) == (2, 2)
    assert ProfileSettings().chosen(3, 9) == (5, 5)
    assert ProfileSettings().chosen(0, 1) == (1, 1)
    assert ProfileSettings(steps=(2, 8)).chosen(3, 6) == (4, 6)
    with pytest.raises(UserError, match="1-2 cannot be profiled: this run takes the steps 3 to 6"):
        ProfileSettings(steps=(1, 2)).chosen(2, 6)
    with pytest.raises(UserError, match="7 cannot be profiled: this run has taken its 6 steps"):
        ProfileSettings(steps=(7, 7)).chosen(6, 6)


def spans_of(*stages: tuple[str, int, int], calls: tuple[tuple[str, int, int, str], ...] = ()) -> Spans:
    """Stages and calls, with times in seconds."""
    spans = Spans()
    for name, start, end in stages:
        spans.add_stage(name, start * 10**9, end * 10**9)
    for name, start, end, stage in calls:
        spans.add_call(name, start * 10**9, end * 10**9, stage)
    return spans


def test_time_that_overlaps_counts_once() -> None:
    spans = spans_of(("a", 0, 4), ("b", 2, 6), ("c", 8, 9))
    assert covered(spans.stages) == 7
    assert covered(spans.stages[:1], spans.stages[1:]) == 2


def test_what_is_neither_model_nor_sampling_nor_reward_is_the_loops_own() -> None:
    spans = spans_of(
        ("generate", 0, 10),
        ("update", 11, 21),
        ("sync", 21, 23),
        ("finish", 23, 24),
        ("evaluation", 24, 50),
        ("finish", 50, 51),
        calls=(
            ("rollout.generate", 1, 9, "generate"),
            ("actor.update", 11, 20, "update"),
            ("rollout.load_weights", 21, 23, "sync"),
            ("rollout.generate", 25, 49, ""),
        ),
    )
    peaks = {"update": 3 * 2**29}
    found = summarise(spans, {}, steps=(4, 4), peaks=peaks, unseen=[], in_this_process=True)
    assert found.step_seconds == 25  # the evaluation is no part of the step
    assert found.own_seconds == 25 - 8 - 9
    stages = {row["stage"]: row for row in found.stages}
    assert {name: row["seconds"] for name, row in stages.items()} == {
        "generate": 10, "update": 10, "sync": 2, "finish": 2, BETWEEN: 1,
    }  # fmt: skip
    assert {name: row["own"] for name, row in stages.items()} == {
        "generate": 2, "update": 1, "sync": 2, "finish": 2, BETWEEN: 1,
    }  # fmt: skip
    assert (stages["update"]["peak_gib"], stages["sync"]["peak_gib"]) == (1.5, None)
    assert found.calls[0] == {"call": "rollout.generate", "calls": 2, "seconds": 32}


def test_several_steps_are_averaged_and_stages_that_overlap_are_named() -> None:
    calls = (("rollout.generate", 0, 8, ELSEWHERE), ("actor.update", 1, 9, "update"))
    spans = spans_of(("generate", 0, 8), ("update", 1, 9), calls=calls)
    found = summarise(spans, {}, steps=(2, 3), peaks={}, unseen=["judge"], in_this_process=False)
    assert (found.step_seconds, found.own_seconds) == (4.5, 0)
    assert any("overlapped" in note for note in found.notes)
    assert any("cannot: judge" in note for note in found.notes)


def test_operators_of_a_device_come_first_and_have_a_column() -> None:
    mine = Capture(
        "host:1", [Operator("slow", "update", 1, cpu_ns=5), Operator("kernel", "update", 2, cpu_ns=1, device_ns=9)]
    )
    found = summarise(spans_of(("update", 0, 1)), {"controller": mine}, steps=(1, 1), peaks={}, unseen=[],
                      in_this_process=True)  # fmt: skip
    assert [row["operator"] for row in found.operators] == ["kernel", "slow"]
    _, headings, rows = tables(found.as_dict())[2]
    assert headings[-1] == "DEVICE MS"
    assert len(rows[0]) == len(headings)


@pytest.fixture
def recording() -> Iterator[Callable[..., Capture]]:
    """Records what a function does in a stage called `work`."""

    def record(work: Callable[[], Any], max_events: int = 10**6) -> Capture:
        assert capture.start()
        assert not capture.start(), "one recording a process"
        with capture.labelled("work") as began:
            work()
        found = capture.stop([("work", began, time.time_ns())], max_events)
        assert found is not None
        return found

    yield record
    capture.stop([], 0)


def test_the_time_of_an_operator_is_without_what_it_called(recording: Callable[..., Capture]) -> None:
    layer = torch.nn.Linear(64, 64)

    def work() -> None:
        for _ in range(5):
            layer(torch.ones(32, 64))

    began = time.time_ns()
    found = recording(work)
    taken = time.time_ns() - began
    by_name = {operator.name: operator for operator in found.operators if operator.stage == "work"}
    assert by_name["aten::linear"].calls == 5
    assert by_name["aten::addmm"].calls == 5
    assert OUTSIDE_OF_OPERATORS in by_name
    assert all(operator.cpu_ns >= 0 for operator in found.operators)
    assert sum(operator.cpu_ns for operator in found.operators) <= taken  # nothing counts twice
    trace = json.loads(gzip.decompress(found.trace))
    assert {"aten::addmm", "stage: work"} <= {event.get("name") for event in trace["traceEvents"]}


def test_a_trace_has_its_first_events_where_there_are_too_many(recording: Callable[..., Capture]) -> None:
    found = recording(lambda: [torch.ones(2) + 1 for _ in range(50)], max_events=20)
    events = json.loads(gzip.decompress(found.trace))["traceEvents"]
    assert len(events) == 20
    assert found.num_events == found.num_left_out + 20
    assert {"name", "ph", "ts", "dur", "pid", "tid"} <= events[0].keys()
    assert sum(operator.calls for operator in found.operators) > 20  # the table counts all of them


def test_without_a_recording_there_is_nothing_to_end() -> None:
    assert capture.stop([], 10) is None


def test_a_profiled_run_is_the_run_that_it_would_be_without(
    tmp_path: Path, small_run: Callable[..., Any], assert_same_run: Callable[[Path, Path], None]
) -> None:
    train(small_run(tmp_path / "plain", "train.steps=4", "evaluation.every=2"))
    outcome = train(
        small_run(tmp_path / "profiled", "train.steps=4", "evaluation.every=2", "checkpoint.every_steps=1"),
        profile=ProfileSettings(steps=(2, 3)),
    )
    assert_same_run(tmp_path / "plain", tmp_path / "profiled")
    folder = tmp_path / "profiled" / "profile"
    assert {path.name for path in folder.iterdir()} == {"profile.json", "profile.txt", "trace-controller.json.gz"}
    said = json.loads((folder / "profile.json").read_text())
    assert said == outcome.profile
    assert (said["first_step"], said["last_step"]) == (2, 3)
    assert [row["stage"] for row in said["stages"]] == [*STAGES, BETWEEN]
    assert sum(row["seconds"] for row in said["stages"]) == pytest.approx(said["step_seconds"])
    assert sum(row["own"] for row in said["stages"]) == pytest.approx(said["own_seconds"], abs=1e-6)
    assert 0 < said["own_share"] < 1
    calls = {row["call"]: row["calls"] for row in said["calls"]}
    assert calls["actor.update"] == 1  # a step
    assert calls["rollout.generate"] == 1.5  # the evaluation after step 2 generates too
    assert all(row["peak_gib"] > 0 for row in said["stages"] if row["stage"] not in ("finish", BETWEEN))
    assert {row["stage"] for row in said["operators"]} >= {"generate", "update", "sync"}
    peaks = [row["metrics"]["perf/peak_memory_gib"] for row in read_metrics(folder.parent) if "metrics" in row]
    assert peaks == sorted(peaks), "each stage has a peak of its own, and the run's is still that of all"
    text = (folder / "profile.txt").read_text()
    assert text == as_text(said)
    assert "steps 2 to 3, on average" in text


def test_a_run_that_generates_ahead_is_profiled_with_the_calls_of_its_other_thread(
    tmp_path: Path, small_run: Callable[..., Any]
) -> None:
    config = small_run(tmp_path / "run", "train.steps=4", "pipeline.mode=double_buffer", "evaluation.at_start=false")
    said = train(config, profile=ProfileSettings(steps=(2, 3))).profile
    assert {"rollout.generate", "actor.update"} <= {row["call"] for row in said["calls"]}
    assert 0 < said["own_share"] < 1
    assert {row["stage"] for row in said["stages"]} >= set(STAGES)


def test_a_resumed_run_is_profiled_too_and_only_in_steps_that_it_takes(
    tmp_path: Path, small_run: Callable[..., Any]
) -> None:
    config = small_run(tmp_path / "run", "train.steps=3", "checkpoint.every_steps=1", "evaluation.at_start=false")
    train(config)
    with pytest.raises(UserError, match="1 cannot be profiled: this run takes the steps 3 to 3"):
        resume(tmp_path / "run", step=2, profile=ProfileSettings(steps=(1, 1)))
    outcome = resume(tmp_path / "run", step=2, profile=ProfileSettings())
    assert (outcome.profile["first_step"], outcome.profile["last_step"]) == (3, 3)


def test_a_profile_that_cannot_be_written_ends_no_run(
    tmp_path: Path, small_run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = small_run(tmp_path / "run", "train.steps=2", "checkpoint.every_steps=1", "evaluation.at_start=false")
    train(config)
    (tmp_path / "run" / "profile").write_text("the user's own", encoding="utf-8")
    outcome = resume(tmp_path / "run", step=1, profile=ProfileSettings())
    assert (outcome.status, outcome.profile["first_step"]) == ("finished", 2)
    assert (tmp_path / "run" / "profile").read_text(encoding="utf-8") == "the user's own"
    assert f"the profile of step 2 cannot be written to {tmp_path / 'run' / 'profile'}: Not a directory" in caplog.text


def test_a_run_that_ends_within_the_chosen_steps_has_a_profile_of_what_it_did(
    tmp_path: Path, small_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("the update fails")

    monkeypatch.setattr("rollstock.roles.model.ModelWorker._actor_loss", fails)
    with pytest.raises(RuntimeError, match="the update fails"):
        train(small_run(tmp_path / "run"), profile=ProfileSettings(steps=(1, 1)))
    said = json.loads((tmp_path / "run" / "profile" / "profile.json").read_text())
    assert "update" in {row["stage"] for row in said["stages"]}
    assert capture.stop([], 0) is None, "the recording has ended"


@pytest.mark.usefixtures("keep_logging")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--profile-steps", "two"], "neither a step, such as 3"),
        (["--profile", "--dry-run"], "leave out one of the two"),
    ],
)
def test_the_command_line_refuses_what_cannot_be_profiled(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "config.yaml", *words]) == 2
    assert reason in capsys.readouterr().err
