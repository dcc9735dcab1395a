"""Every check of the environment, reward, tracker and device kits can fail."""

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from rollstock import (
    BatchReward,
    Device,
    Environment,
    Memory,
    Message,
    NoOptions,
    Reward,
    RunInfo,
    Sample,
    Split,
    Task,
    Tracker,
)
from rollstock.hardware.cpu import CPU
from rollstock.testing import ConformanceError, check_device, check_environment, check_reward, check_tracker
from rollstock.testing.reward import Sums


class Echo(Sums):
    """A right environment of two turns: the other side asks once more."""

    def respond(self, task: Task, turns: Sequence[Message], state: dict[str, Any]) -> str | None:
        state["asked"] = state.get("asked", 0) + 1
        return "are you sure?" if state["asked"] < 2 else None


class SizeIsAFloat(Echo):
    def num_tasks(self, split: Split) -> int:
        return 50.0  # type: ignore[return-value]  # the mistake


class SizeGrows(Echo):
    calls = 0

    def num_tasks(self, split: Split) -> int:
        self.calls += 1
        return 49 + self.calls


class NothingToTrainOn(Echo):
    def num_tasks(self, split: Split) -> int:
        return 0


class Changed(Echo):
    """What the wrong environments below have in common: they change a right task."""

    def changed(self, task: Task, split: Split, index: int) -> Any:
        return task

    def task(self, split: Split, index: int) -> Task:
        found: Task = self.changed(super().task(split, index), split, index)
        return found


class TaskIsADict(Changed):
    def changed(self, task: Task, split: Split, index: int) -> Any:
        return vars(task)


class NoId(Changed):
    def changed(self, task: Task, split: Split, index: int) -> Any:
        return Task(id="", prompt=task.prompt)


class SameId(Changed):
    def changed(self, task: Task, split: Split, index: int) -> Any:
        return Task(id="task", prompt=task.prompt)


class EmptyPrompt(Changed):
    def changed(self, task: Task, split: Split, index: int) -> Any:
        return Task(id=task.id, prompt="")


class MessageWithoutRole(Changed):
    def changed(self, task: Task, split: Split, index: int) -> Any:
        return Task(id=task.id, prompt=[{"content": "1+1"}])


class AnswerIsASet(Changed):
    def changed(self, task: Task, split: Split, index: int) -> Any:
        return Task(id=task.id, prompt=task.prompt, answer={1, 2})


class ResponsesAreOneText(Changed):
    def changed(self, task: Task, split: Split, index: int) -> Any:
        return Task(id=task.id, prompt=task.prompt, responses="one")  # type: ignore[arg-type]  # the mistake


class CarriesAFunction(Changed):
    def changed(self, task: Task, split: Split, index: int) -> Any:
        return Task(id=task.id, prompt=task.prompt, metadata={"check": lambda text: True})


class DrawsGlobally(Changed):
    def changed(self, task: Task, split: Split, index: int) -> Any:
        return Task(id=task.id, prompt=f"{random.random()}+1=")


class CountsCalls(Changed):
    calls = 0

    def changed(self, task: Task, split: Split, index: int) -> Any:
        self.calls += 1
        return Task(id=task.id, prompt=f"{self.calls}+1=")


class SplitsMeet(Changed):
    def changed(self, task: Task, split: Split, index: int) -> Any:
        return Task(id=f"{split}-{index}", prompt=f"{index}+1=")


class SplitsShareIds(Changed):
    def changed(self, task: Task, split: Split, index: int) -> Any:
        return Task(id=f"task-{index}", prompt=task.prompt)


class WritesIntoTurns(Echo):
    def respond(self, task: Task, turns: Sequence[Message], state: dict[str, Any]) -> str | None:
        assert isinstance(turns, list)
        turns.append({"role": "user", "content": "and?"})
        return None


class RemembersOutsideOfState(Echo):
    asked = 0

    def respond(self, task: Task, turns: Sequence[Message], state: dict[str, Any]) -> str | None:
        self.asked += 1
        return str(self.asked)

    def setup(self, seed: int) -> None:
        self.asked = random.randrange(10**6)


class StateIsNoJSON(Echo):
    def respond(self, task: Task, turns: Sequence[Message], state: dict[str, Any]) -> str | None:
        state["seen"] = {1}
        return None


class RepliesWithNothing(Echo):
    def respond(self, task: Task, turns: Sequence[Message], state: dict[str, Any]) -> str | None:
        return ""


class ScoreIsNaN(Echo):
    def score(self, sample: Sample) -> float:
        return 1.0 if sample.response else float("nan")


class ScoreIsAText(Echo):
    def score(self, sample: Sample) -> float:
        return "right"  # type: ignore[return-value]  # the mistake


class ScoreRaises(Echo):
    def score(self, sample: Sample) -> float:
        return float(int(sample.response) == 3)


class ScoreIsNoisy(Echo):
    def score(self, sample: Sample) -> float:
        return super().score(sample) + random.random()


class ScoreMarksTheSample(Echo):
    def score(self, sample: Sample) -> float:
        sample.state["scored"] = True
        return super().score(sample)


class OwnAnswerIsWorse(Echo):
    def score(self, sample: Sample) -> float:
        return float(sample.response.strip() != sample.task.answer)


class FingerprintIsTheClock(Echo):
    def fingerprint(self) -> str:
        return str(random.random())


WRONG_ENVIRONMENTS: list[tuple[type[Environment[Any]], str, str]] = [
    (SizeIsAFloat, "sizes", "50.0"),
    (SizeGrows, "sizes", "changes"),
    (NothingToTrainOn, "sizes", "no training tasks"),
    (TaskIsADict, "tasks", "rollstock.Task"),
    (NoId, "tasks", "not empty"),
    (SameId, "tasks", "two tasks"),
    (EmptyPrompt, "tasks", "is empty"),
    (MessageWithoutRole, "tasks", "message"),
    (AnswerIsASet, "tasks", "JSON"),
    (ResponsesAreOneText, "tasks", "list of texts"),
    (CarriesAFunction, "tasks", "pickle"),
    (DrawsGlobally, "purity", "derive_seed"),
    (CountsCalls, "purity", "another order"),
    (SplitsMeet, "splits", "asks what training task"),
    (SplitsShareIds, "splits", "in both splits"),
    (WritesIntoTurns, "conversation", "turns"),
    (RemembersOutsideOfState, "conversation", "in `state` alone"),
    (StateIsNoJSON, "conversation", "JSON"),
    (RepliesWithNothing, "conversation", "return a text"),
    (ScoreIsNaN, "scores", "nan"),
    (ScoreIsAText, "scores", "'right'"),
    (ScoreRaises, "scores", "ValueError"),
    (ScoreIsNoisy, "scores", "second time"),
    (ScoreMarksTheSample, "scores", "changes the sample"),
    (OwnAnswerIsWorse, "scores", "own answer"),
    (FingerprintIsTheClock, "fingerprint", "checksum"),
]


@pytest.mark.parametrize(
    ("wrong", "check", "said"), WRONG_ENVIRONMENTS, ids=[w.__name__ for w, _, _ in WRONG_ENVIRONMENTS]
)
def test_a_wrong_environment_is_caught_by_its_check(wrong: type[Environment[Any]], check: str, said: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_environment(wrong)
    assert caught.value.check == check
    assert said in str(caught.value)


def test_a_right_environment_passes() -> None:
    assert check_environment(Echo).skipped == {}


class Length(Reward[NoOptions]):
    """A right reward."""

    def score(self, sample: Sample) -> float | None:
        return 1.0 / len(sample.response) if sample.response else None


class Infinite(Length):
    def score(self, sample: Sample) -> float:
        return float("inf")


class RaisesOnNothing(Length):
    def score(self, sample: Sample) -> float:
        return 1.0 / len(sample.response)


class ComparesWithTheLast(Length):
    last = 0.0

    def score(self, sample: Sample) -> float:
        before, self.last = self.last, float(len(sample.response))
        return self.last - before


class NoisyReward(Length):
    def score(self, sample: Sample) -> float:
        return random.random()


class Unsendable(float):
    def __reduce__(self) -> Any:
        raise TypeError("not to be sent")


class GivesAnUnsendable(Length):
    def score(self, sample: Sample) -> float:
        return Unsendable(1.0)


WRONG_REWARDS: list[tuple[type[Reward[Any]], str, str]] = [
    (Infinite, "scores", "inf"),
    (RaisesOnNothing, "scores", "ZeroDivisionError"),
    (ComparesWithTheLast, "determinism", "another order"),
    (NoisyReward, "determinism", "another order"),
    (GivesAnUnsendable, "transport", "not to be sent"),
]


class BatchLength(BatchReward[NoOptions]):
    """A right reward of batches."""

    def score_batch(self, samples: Sequence[Sample]) -> list[float | None]:
        return [1.0 / len(sample.response) if sample.response else None for sample in samples]


class ComparesWithNeighbours(BatchLength):
    def score_batch(self, samples: Sequence[Sample]) -> list[float | None]:
        longest = max((len(sample.response) for sample in samples), default=1) or 1
        return [len(sample.response) / longest for sample in samples]


class SortsTheSamples(BatchLength):
    def score_batch(self, samples: Sequence[Sample]) -> list[float | None]:
        return super().score_batch(sorted(samples, key=lambda sample: sample.response))


class ForgetsAbstentions(BatchLength):
    def score_batch(self, samples: Sequence[Sample]) -> list[float | None]:
        found = super().score_batch(samples)
        return found if len(found) == 1 else [score for score in found if score is not None]


WRONG_REWARDS += [
    (ComparesWithNeighbours, "batches", "alone, and"),
    (SortsTheSamples, "batches", "in a batch"),
    (ForgetsAbstentions, "batches", "scores for"),
]


@pytest.mark.parametrize(("wrong", "check", "said"), WRONG_REWARDS, ids=[w.__name__ for w, _, _ in WRONG_REWARDS])
def test_a_wrong_reward_is_caught_by_its_check(wrong: type[Reward[Any]], check: str, said: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_reward(wrong)
    assert caught.value.check == check
    assert said in str(caught.value)


def test_a_right_reward_passes_with_an_environment_by_name() -> None:
    assert check_reward(Length).skipped == {}
    assert check_reward(Length, environment="arithmetic").skipped == {}
    assert "batches" in check_reward(BatchLength).passed


class Lines(Tracker[NoOptions]):
    """A right tracker: one line of JSON a step, written at once."""

    file: TextIO

    def start(self, run: RunInfo, state: Mapping[str, Any]) -> None:
        path = run.directory / "lines.txt"
        kept = []
        if run.resumed_at is not None and path.exists():
            rows = path.read_text().splitlines()
            kept = [row for row in rows if json.loads(row)[0] <= run.resumed_at]
        path.write_text("".join(f"{row}\n" for row in kept))
        self.file = path.open("a")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        print(json.dumps([step, dict(metrics)]), file=self.file, flush=True)

    def finish(self, status: str) -> None:
        self.file.close()


def read_lines(folder: Path) -> list[tuple[int, dict[str, float]]]:
    return [(row[0], row[1]) for row in map(json.loads, (folder / "lines.txt").read_text().splitlines())]


class RefusesFailure(Lines):
    def finish(self, status: str) -> None:
        self.file.close()
        assert status != "failed"


class ChangesMetrics(Lines):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        assert isinstance(metrics, dict)
        metrics["step"] = step


class FailsOnNaN(Lines):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        print(json.dumps([step, dict(metrics)], allow_nan=False), file=self.file, flush=True)


class StateIsAPath(Lines):
    def state(self) -> dict[str, Any]:
        return {"path": Path("lines.txt")}


class NeedsItsState(Lines):
    def start(self, run: RunInfo, state: Mapping[str, Any]) -> None:
        super().start(run, state)
        if run.resumed_at is not None:
            assert state["position"]


class WritesLate(Lines):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        print(json.dumps([step, dict(metrics)]), file=self.file)


class KeepsLostSteps(Lines):
    def start(self, run: RunInfo, state: Mapping[str, Any]) -> None:
        self.file = (run.directory / "lines.txt").open("a")


class RoundsMetrics(Lines):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, {name: round(value) if abs(value) < 9 else value for name, value in metrics.items()})


class StaysOpen(Lines):
    files: list[TextIO] = []  # noqa: RUF012  # shared on purpose, so that nothing closes them

    def finish(self, status: str) -> None:
        self.files.append(self.file)


WRONG_TRACKERS: list[tuple[type[Tracker[Any]], str, str]] = [
    (RefusesFailure, "life", "AssertionError"),
    (ChangesMetrics, "life", "has changed"),
    (FailsOnNaN, "odd_numbers", "ValueError"),
    (StateIsAPath, "state", "JSON"),
    (NeedsItsState, "state", "KeyError"),
    (WritesLate, "restart", "flush"),
    (KeepsLostSteps, "restart", "[1, 2, 3, 3, 4]"),
    (RoundsMetrics, "restart", "step 1 has"),
    (StaysOpen, "closing", "still open"),
]


@pytest.mark.parametrize(("wrong", "check", "said"), WRONG_TRACKERS, ids=[w.__name__ for w, _, _ in WRONG_TRACKERS])
def test_a_wrong_tracker_is_caught_by_its_check(
    wrong: type[Tracker[Any]], check: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_tracker(wrong, directory=tmp_path, read=read_lines)
    assert caught.value.check == check
    assert said in str(caught.value)


def test_a_right_tracker_passes(tmp_path: Path) -> None:
    assert check_tracker(Lines, directory=tmp_path, read=read_lines).skipped == {}


class AvailableWithoutDevice(CPU):
    def count(self) -> int:
        return 0


class Missing(CPU):
    def unavailable(self) -> str | None:
        return "the chip is not plugged in"

    def count(self) -> int:
        return 0

    def activate(self, index: int = 0) -> None:
        from rollstock import UserError

        raise UserError(self.unavailable())


class MissingButCounted(Missing):
    def count(self) -> int:
        return 2


class MissingButActive(Missing):
    def activate(self, index: int = 0) -> None:
        return


class NoCollectives(CPU):
    @property
    def collective_backend(self) -> str:
        return ""


class IgnoresSeeds(CPU):
    def seed(self, seed: int) -> None:
        return


class OneSeed(CPU):
    def seed(self, seed: int) -> None:
        super().seed(7)


class MemoryInGiB(CPU):
    def memory(self, index: int = 0) -> Memory:
        found = super().memory(index)
        return Memory(found.total / 2**30, found.free, found.allocated, found.peak)  # type: ignore[arg-type]  # the mistake


class MemoryStandsStill(CPU):
    def memory(self, index: int = 0) -> Memory:
        return Memory(total=2**34, free=2**33, allocated=2**33, peak=2**33)


class EverythingIsOutOfMemory(CPU):
    def is_out_of_memory(self, error: BaseException) -> bool:
        return True


class NothingIsOutOfMemory(CPU):
    def is_out_of_memory(self, error: BaseException) -> bool:
        return False


class NeverAutocasts(CPU):
    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        return nullcontext()


class AlwaysAutocasts(CPU):
    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)


class NoStreams(CPU):
    def stream(self) -> AbstractContextManager[Any]:
        raise NotImplementedError("this chip has no streams")


class StatisticsWithPrefix(CPU):
    def statistics(self) -> dict[str, float]:
        return {"cpu/load": 1.0}


WRONG_DEVICES: list[tuple[type[Device[Any]], str, str]] = [
    (AvailableWithoutDevice, "availability", "no device"),
    (MissingButCounted, "availability", "counts 2"),
    (MissingButActive, "availability", "UserError"),
    (NoCollectives, "names", "gloo"),
    (IgnoresSeeds, "seed", "two sequences"),
    (OneSeed, "seed", "two seeds"),
    (MemoryInGiB, "memory", "whole numbers"),
    (MemoryStandsStill, "memory", "64 MiB"),
    (EverythingIsOutOfMemory, "out_of_memory", "counts as"),
    (NothingIsOutOfMemory, "out_of_memory", "not known as one"),
    (NeverAutocasts, "autocast", "bfloat16"),
    (AlwaysAutocasts, "autocast", "nullcontext"),
    (NoStreams, "streams", "no streams"),
    (StatisticsWithPrefix, "statistics", "without prefix"),
]


@pytest.mark.parametrize(("wrong", "check", "said"), WRONG_DEVICES, ids=[w.__name__ for w, _, _ in WRONG_DEVICES])
def test_a_wrong_device_is_caught_by_its_check(wrong: type[Device[Any]], check: str, said: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_device(wrong)
    assert caught.value.check == check
    assert said in str(caught.value)


def test_a_device_that_is_not_there_has_its_reason_in_the_report() -> None:
    report = check_device(Missing)
    assert report.passed == ("options", "availability")
    assert set(report.skipped.values()) == {"not on this machine: the chip is not plugged in"}
