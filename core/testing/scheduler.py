"""The conformance kit of schedulers: whatever it decides, every index and expert has its place.

For authors of schedulers, who call `check_scheduler(MyScheduler)` in a test. Decisions that a scheduler leaves to
others are None, and pass; how good they are is left to its own tests.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstock.interfaces.device import Memory
from rollstock.interfaces.scheduler import Scheduler, WorkerLoad
from rollstock.testing.kit import NotApplicable, Report, expect, run_checks
from rollstock.testing.runs import tiny_config
from rollstock.testing.subject import Subject, check_json
from rollstock.testing.subject import check_options as check_plugin_options

GIB = 1 << 30
LENGTHS: dict[str, list[int]] = {
    "no sequences": [],
    "one sequence": [7],
    "equal lengths": [16] * 12,
    "mixed lengths": [5, 900, 31, 31, 2, 450, 77, 1, 640, 12, 12, 380],
    "one that is longer than any budget": [3, 10_000_000, 4],
    "lengths of 0": [0, 0, 5, 0],
}


@dataclass(frozen=True)
class SchedulerCase:
    """The scheduler under test."""

    subject: Subject[Scheduler[Any]]

    def make(self) -> Scheduler[Any]:
        """A fresh scheduler."""
        return self.subject.make()


def check_scheduler(
    scheduler: type[Scheduler[Any]] | Scheduler[Any] | str,
    *,
    options: Mapping[str, Any] | None = None,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check a scheduler, given as a class, an instance or an installed plugin's name.

    options: of the plugin; skip: checks that do not hold on purpose, each with the reason. Raises ConformanceError.
    """
    case = SchedulerCase(Subject(Scheduler, scheduler, options))
    return run_checks(case.subject.label, CHECKS, case, skip=skip)


def check_options(case: SchedulerCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


def check_validation(case: SchedulerCase) -> None:
    """`validate` takes a run config, with the roles that can change or without, and gives a list of sentences."""
    for resizable in (["rollout", "reward"], []):
        with tempfile.TemporaryDirectory() as folder:
            problems: object = case.make().validate(tiny_config(Path(folder) / "unused", {}), resizable)
        expect(
            isinstance(problems, list | tuple) and all(isinstance(problem, str) for problem in problems),
            f"`validate` gives {problems!r}",
            mend="return a list of sentences, empty when all is well",
        )


def check_micro_batches(case: SchedulerCase) -> None:
    """Micro-batches hold each index once; with several parts, each part gets the same number of them."""
    decided = False
    for name, lengths in LENGTHS.items():
        for num_parts in (1, 2, 3):
            for groups in (None, [i // 4 for i in range(len(lengths))]):
                random.seed(0)
                first = case.make().micro_batches(lengths, groups=groups, num_parts=num_parts)
                random.seed(1)
                second = case.make().micro_batches(lengths, groups=groups, num_parts=num_parts)
                expect(
                    first == second,
                    f"for {name}, the same lengths are cut in two ways",
                    mend="a cut depends on lengths, groups and options alone: every rank must find the same one",
                )
                if first is not None:
                    decided = True
                    _check_cut(first, len(lengths), num_parts, name)
    if not decided:
        raise NotApplicable("it leaves micro-batches to others (None)")


def _check_cut(cut: Sequence[Sequence[int]], count: int, num_parts: int, name: str) -> None:
    indices = sorted(index for part in cut for index in part)
    expect(
        indices == list(range(count)),
        f"for {name}, {count} sequences are cut into {[list(part) for part in cut]}",
        mend="each index from 0 to len(lengths) - 1 belongs to exactly one micro-batch: drop none, repeat none",
    )
    expect(
        len(cut) % num_parts == 0,
        f"for {name} and {num_parts} ranks there are {len(cut)} micro-batches",
        mend="return a multiple of `num_parts` lists, empty ones where there are too few sequences",
    )


def check_generation(case: SchedulerCase) -> None:
    """A generation batch has at least one sequence, even if memory is short, and never more for more bytes a token."""
    decided = False
    memories = {"no memory": 0, "little memory": GIB // 64, "much memory": 64 * GIB}
    for name, free in memories.items():
        memory = Memory(total=64 * GIB, free=free, allocated=64 * GIB - free, peak=64 * GIB)
        sizes = [
            case.make().generation_batch_size([100] * 64, 200, bytes_per_token=cost, memory=memory)
            for cost in (1_000, 100_000, 10_000_000)
        ]
        for size in sizes:
            if size is not None:
                decided = True
                expect(
                    isinstance(size, int) and size >= 1,
                    f"with {name}, {size!r} sequences are to be generated at once",
                    mend="return at least 1: a failed allocation is handled by the engine",
                )
        given = [size for size in sizes if size is not None]
        expect(
            given == sorted(given, reverse=True),
            f"with {name}, batches of {given} sequences for tokens of 1 kB, 100 kB and 10 MB",
            mend="a larger cache must not make the batch larger",
        )
    if not decided:
        raise NotApplicable("it leaves the size of generation batches to others (None)")


def check_workers(case: SchedulerCase) -> None:
    """A role keeps at least one worker, whatever its load."""
    decided = False
    scheduler = case.make()
    for queue in (0, 1, 1000):
        for share in (0.0, 0.5, 1.0):
            found = scheduler.num_workers(
                WorkerLoad(role="rollout", num_workers=2, queue_length=queue, utilisation=share)
            )
            if found is not None:
                decided = True
                expect(
                    isinstance(found, int) and found >= 1,
                    f"with {queue} tasks waiting and a utilisation of {share}, {found!r} workers are wanted",
                    mend="return at least 1, or None to leave things as they are",
                )
    if not decided:
        raise NotApplicable("it leaves the number of workers to others (None)")


def check_places(case: SchedulerCase) -> None:
    """Every expert of every layer has a place that exists."""
    decided = False
    loads: list[list[list[float]]] = [[[1.0] * 8, [0.0] * 8], [[100.0, 1, 1, 1, 1, 1, 1, 1]], []]
    for load in loads:
        for num_places in (1, 2, 4):
            found = case.make().place_experts(load, num_places)
            if found is not None:
                decided = True
                right = len(found) == len(load) and all(
                    len(places) == len(experts) and all(0 <= place < num_places for place in places)
                    for places, experts in zip(found, load, strict=True)
                )
                expect(
                    right,
                    f"for loads {load} on {num_places} places, experts live at {found}",
                    mend="return for each layer a list with one place, 0 to num_places - 1, for each expert",
                )
    if not decided:
        raise NotApplicable("it leaves the places of experts to others (None)")


def check_state(case: SchedulerCase) -> None:
    """State is JSON, and a scheduler that takes it back gives it again."""
    scheduler = case.make()
    scheduler.micro_batches(LENGTHS["mixed lengths"])
    scheduler.num_workers(WorkerLoad(role="rollout", num_workers=2, queue_length=5, utilisation=0.9))
    state = check_json(scheduler.state(), "the state")
    other = case.make()
    other.load_state(state)
    expect(
        other.state() == state, f"after load_state({state}), the state is {other.state()}", mend="take back all of it"
    )
    lengths = LENGTHS["equal lengths"]
    expect(
        other.micro_batches(lengths) == scheduler.micro_batches(lengths),
        "a scheduler that took the state back decides differently from the one that gave it",
        mend="put all that decisions depend on into `state`",
    )


CHECKS = (
    check_options,
    check_validation,
    check_micro_batches,
    check_generation,
    check_workers,
    check_places,
    check_state,
)
