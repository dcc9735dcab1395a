"""The conformance kit of trackers: a whole run is recorded, and so is one that goes on from a checkpoint.

For authors of trackers, who call `check_tracker(MyTracker, directory=tmp_path)` in a test. What the records look like
is left to them; with `read`, the kit also checks that each step is recorded once.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstock.interfaces.tracker import RunInfo, Tracker
from rollstock.testing.kit import NotApplicable, Report, expect, run_checks
from rollstock.testing.subject import Subject, check_json
from rollstock.testing.subject import check_options as check_plugin_options

Records = Sequence[tuple[int, Mapping[str, float]]]
"""What a tracker recorded: step and metrics, in order."""


@dataclass(frozen=True)
class TrackerCase:
    """The tracker under test, where it may write, and how its records are read back."""

    subject: Subject[Tracker[Any]]
    directory: Path
    read: Callable[[Path], Records] | None

    def run(self, name: str, *, resumed_at: int | None = None) -> RunInfo:
        """A run with a directory of its own."""
        folder = self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        config = {"train": {"steps": 4}, "run": {"name": name}}
        return RunInfo(name=name, directory=folder, config=config, num_steps=4, resumed_at=resumed_at)


def check_tracker(
    tracker: type[Tracker[Any]] | Tracker[Any] | str,
    *,
    directory: Path,
    options: Mapping[str, Any] | None = None,
    read: Callable[[Path], Records] | None = None,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check a tracker, given as a class, an instance or an installed plugin's name.

    directory: an empty one to write to; options: of the plugin; read: gives back what was recorded in a run's
    directory, `(step, metrics)` in order; skip: checks that do not hold on purpose, each with the reason. Raises
    ConformanceError.
    """
    case = TrackerCase(Subject(Tracker, tracker, options), directory, read)
    return run_checks(case.subject.label, CHECKS, case, skip=skip)


def metrics_of(step: int) -> dict[str, float]:
    """Made-up metrics, names sorted, as a run logs them."""
    return {"actor/pg_loss": -0.5 / step, "reward/mean": 0.25 * step, "timing_s/step": 1.5}


def rows_of(step: int) -> list[dict[str, Any]]:
    """Made-up trajectories of a step, one of them with all that can be missing or odd."""
    plain = {
        "step": step,
        "group": 0,
        "task_id": "1+1",
        "prompt": "1+1=",
        "response": "2",
        "answer": "2",
        "reward": 1.0,
        "rewards": {"environment": 1.0},
        "finish_reason": "stop",
        "num_tokens": 2,
        "advantage": 0.5,
    }
    odd = {
        **plain,
        "response": "[bold]\n\x1b[31m \u4f60\U0001f642 \ud800",
        "answer": None,
        "reward": None,
        "rewards": {"environment": None},
        "advantage": None,
        "num_tokens": 0,
    }
    return [plain, odd]


def check_options(case: TrackerCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


def check_life(case: TrackerCase) -> None:
    """A tracker takes all that a run tells, in the order in which it does, and changes none of it."""
    for status in ("finished", "interrupted", "failed"):
        tracker = case.subject.make()
        tracker.start(case.run(f"life-{status}"), {})
        tracker.evaluation(0, {"eval/greedy/reward_mean": 0.1})
        for step in (1, 2):
            told = (rows_of(step), metrics_of(step))
            before = copy.deepcopy(told)
            tracker.samples(step, told[0])
            tracker.log(step, told[1])
            expect(told == before, "what was told has changed", mend="copy metrics and rows before you change them")
            tracker.evaluation(step, {"eval/greedy/reward_mean": 0.2})
            tracker.message("stopped [because] of 100% {everything}")
        tracker.finish(status)
    tracker = case.subject.make()
    tracker.start(case.run("life-empty"), {})
    tracker.finish("failed")


def check_odd_numbers(case: TrackerCase) -> None:
    """Metrics that are not finite, and metrics that come and go, are recorded and end nothing."""
    tracker = case.subject.make()
    tracker.start(case.run("odd"), {})
    tracker.log(1, {"actor/grad_norm": float("nan"), "actor/pg_loss": float("inf")})
    tracker.log(2, {"actor/grad_norm": 1.0, "new/metric": float("-inf")})
    tracker.log(3, {})
    tracker.samples(3, [])
    tracker.finish("finished")


def check_state(case: TrackerCase) -> None:
    """State is JSON, and a new instance goes on from it."""
    tracker = case.subject.make()
    tracker.start(case.run("state"), {})
    tracker.log(1, metrics_of(1))
    state = check_json(tracker.state(), "the state")
    tracker.finish("interrupted")
    again = case.subject.make()
    again.start(case.run("state", resumed_at=1), state)
    again.log(2, metrics_of(2))
    check_json(again.state(), "the state")
    again.finish("finished")


def check_restart(case: TrackerCase) -> None:
    """After a restart, the records up to the checkpoint are there once, and later ones of the lost process are void."""
    if case.read is None:
        raise NotApplicable("pass `read` to the kit to have the records read back")
    tracker = case.subject.make()
    run = case.run("restart")
    tracker.start(run, {})
    for step in (1, 2):
        tracker.log(step, metrics_of(step))
    state = tracker.state()
    _check_steps(case.read(run.directory), [1, 2], "when `state` was asked", "write and flush before `state` returns")
    tracker.log(3, {"reward/mean": -1.0})  # lost: the checkpoint is of step 2, and the process is killed
    again = case.subject.make()
    again.start(case.run("restart", resumed_at=2), state)
    for step in (3, 4):
        again.log(step, metrics_of(step))
    again.finish("finished")
    mend = "in `start`, drop what was recorded after `resumed_at`, or after the position in `state`"
    _check_steps(case.read(run.directory), [1, 2, 3, 4], "after a restart at step 2", mend)


def _check_steps(records: Records, steps: list[int], when: str, mend: str) -> None:
    found = [step for step, _ in records]
    expect(found == steps, f"{when}, the records are those of steps {found}, not {steps}", mend=mend)
    for step, metrics in records:
        right = metrics_of(step)
        wrong = [name for name, value in right.items() if abs(metrics.get(name, float("inf")) - value) > 1e-6]
        expect(not wrong, f"{when}, step {step} has {dict(metrics)}, not {right}", mend=mend)


def check_closing(case: TrackerCase) -> None:
    """`finish` closes every file in the run's directory."""
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        raise NotApplicable("this system does not list open files in /proc")
    tracker = case.subject.make()
    run = case.run("closing")
    tracker.start(run, {})
    tracker.log(1, metrics_of(1))
    tracker.samples(1, rows_of(1))
    tracker.finish("finished")
    inside = str(run.directory.resolve())
    still_open = sorted(name for name in _open_files(descriptors) if name.startswith(inside))
    expect(not still_open, f"after `finish`, {still_open} is still open", mend="close files and writers in `finish`")


def _open_files(descriptors: Path) -> list[str]:
    found = []
    for entry in descriptors.iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:  # closed in the meantime, as the listing itself is
            continue
    return found


CHECKS = (check_options, check_life, check_odd_numbers, check_state, check_restart, check_closing)
