"""Every check of the compressor, scheduler, executor and extension kits can fail."""

import dataclasses
import random
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import (
    Algorithm,
    Batch,
    Compressor,
    Executor,
    Extension,
    Memory,
    Metric,
    Metrics,
    NoOptions,
    Payload,
    Run,
    RunConfig,
    RunError,
    Scheduler,
    WorkerGroup,
    WorkerLoad,
    WorkerSpec,
    hookimpl,
)
from rollstock.plugins.compressors.none import Uncompressed
from rollstock.plugins.executors.local import Local, LocalGroup
from rollstock.plugins.schedulers.dynamic_batch import DynamicBatch
from rollstock.testing import (
    ConformanceError,
    check_compressor,
    check_executor,
    check_extension,
    check_scheduler,
)


class TopTenth(Compressor[NoOptions]):
    """A right lossy compressor: the tenth with the largest magnitudes, and error feedback."""

    def __init__(self, config: NoOptions | None = None) -> None:
        super().__init__(config)
        self.residuals: dict[str, Tensor] = {}

    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        flat = tensor.float().flatten() + self.residuals.get(key, 0.0)
        where = flat.abs().topk(-(-flat.numel() // 10)).indices
        kept = flat[where]
        self.residuals[key] = flat.index_fill(0, where, 0.0)
        tensors = {"values": kept, "where": where.to(torch.int32)}
        return Payload(tensors=tensors, shape=tuple(tensor.shape), dtype=tensor.dtype)

    def decompress(self, payload: Payload) -> Tensor:
        whole = torch.zeros(payload.shape).flatten()
        whole[payload.tensors["where"].long()] = payload.tensors["values"]
        return whole.reshape(payload.shape).to(payload.dtype)

    def state(self) -> dict[str, Tensor]:
        return self.residuals

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.residuals = dict(state)


class FlatComesBack(Uncompressed):
    def decompress(self, payload: Payload) -> Tensor:
        return payload.tensors["whole"].flatten()


class AlwaysFloat(Uncompressed):
    def decompress(self, payload: Payload) -> Tensor:
        return super().decompress(payload).float()


class WritesIntoItsArgument(Uncompressed):
    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        return super().compress(tensor.mul_(0.5), key=key)


class HalfPrecision(Uncompressed):
    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        return Payload(tensors={"whole": tensor.half()}, shape=tuple(tensor.shape), dtype=tensor.dtype)

    def decompress(self, payload: Payload) -> Tensor:
        return super().decompress(payload).to(payload.dtype)


class ScaleAsATensor(Uncompressed):
    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        found = super().compress(tensor, key=key)
        found.values["scale"] = torch.ones(1)
        return found


class RemembersTheScale(Uncompressed):
    scale = 1.0

    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        self.scale = RemembersTheScale.scale = 2.0 + random.random()
        return super().compress(tensor / self.scale, key=key)

    def decompress(self, payload: Payload) -> Tensor:
        RemembersTheScale.scale += 1
        return (super().decompress(payload) * RemembersTheScale.scale).to(payload.dtype)


class DoublePrecision(Uncompressed):
    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        return Payload(tensors={"whole": tensor.double()}, shape=tuple(tensor.shape), dtype=tensor.dtype)

    def decompress(self, payload: Payload) -> Tensor:
        return super().decompress(payload).to(payload.dtype)


class Halves(Uncompressed):
    def decompress(self, payload: Payload) -> Tensor:
        return super().decompress(payload) * 0.5


class NothingBecomesSomething(Uncompressed):
    def decompress(self, payload: Payload) -> Tensor:
        return super().decompress(payload) + 1e-12


class RoundsAtRandom(Uncompressed):
    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        noise = 1 + 1e-3 * torch.rand(tensor.shape)
        return super().compress((tensor * noise).to(tensor.dtype), key=key)


class KeepsResidualsForItself(TopTenth):
    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        kept = self.residuals.pop(key, None)
        found = super().compress(tensor, key=key)
        self.residuals[key] = found.tensors["values"] if kept is None else kept
        flat = tensor.float().flatten()
        where = found.tensors["where"].long()
        self.residuals[key] = torch.zeros_like(flat)
        self.residuals[key][where] = 0.0
        return found


class MixesStreams(TopTenth):
    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        return super().compress(tensor, key=str(tensor.numel()))


class StateIsHalf(TopTenth):
    def load_state(self, state: dict[str, Tensor]) -> None:
        return


WRONG_COMPRESSORS: list[tuple[type[Compressor[Any]], str, str]] = [
    (FlatComesBack, "shapes", "comes back as"),
    (AlwaysFloat, "shapes", "comes back as"),
    (WritesIntoItsArgument, "shapes", "changes its tensor"),
    (ScaleAsATensor, "payload", "JSON"),
    (RemembersTheScale, "payload", "travelled"),
    (DoublePrecision, "size", "2 of the tensor"),
    (HalfPrecision, "error", "of their norm"),
    (Halves, "error", "of their norm"),
    (NothingBecomesSomething, "error", "zeros"),
    (RoundsAtRandom, "determinism", "two different ones"),
    (KeepsResidualsForItself, "feedback", "residual"),
    (MixesStreams, "streams", "in between"),
    (StateIsHalf, "state", "took the state back"),
]


@pytest.mark.parametrize(
    ("wrong", "check", "said"), WRONG_COMPRESSORS, ids=[w.__name__ for w, _, _ in WRONG_COMPRESSORS]
)
def test_a_wrong_compressor_is_caught_by_its_check(wrong: type[Compressor[Any]], check: str, said: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_compressor(wrong, tolerance=0.9 if issubclass(wrong, TopTenth) else 0.01)
    assert caught.value.check == check
    assert said in str(caught.value)


def test_a_right_compressor_passes() -> None:
    assert check_compressor(TopTenth, tolerance=0.9, ratio=0.25).skipped == {}


class DropsTheLast(DynamicBatch):
    def micro_batches(self, lengths: Sequence[int], **rest: Any) -> list[list[int]]:
        return [part[: max(len(part) - 1, 1)] for part in super().micro_batches(lengths, **rest)]


class IgnoresParts(DynamicBatch):
    def micro_batches(self, lengths: Sequence[int], **rest: Any) -> list[list[int]]:
        return super().micro_batches(lengths, groups=rest.get("groups"))


class CutsAtRandom(DynamicBatch):
    def micro_batches(self, lengths: Sequence[int], **rest: Any) -> list[list[int]]:
        found = super().micro_batches(lengths, **rest)
        random.shuffle(found[0])
        return found


class FailsOnNothing(DynamicBatch):
    def micro_batches(self, lengths: Sequence[int], **rest: Any) -> list[list[int]]:
        return super().micro_batches([*lengths, max(lengths)][:-1], **rest)


class NoBatchAtAll(DynamicBatch):
    def generation_batch_size(self, *arguments: Any, bytes_per_token: int, memory: Memory) -> int:
        return memory.free // (64 * bytes_per_token * 300)


class MoreForLarger(DynamicBatch):
    def generation_batch_size(self, *arguments: Any, bytes_per_token: int, memory: Memory) -> int:
        return bytes_per_token


class NoWorkers(DynamicBatch):
    def num_workers(self, load: WorkerLoad) -> int:
        return load.queue_length


class PlacesByExpert(DynamicBatch):
    def place_experts(self, load: Sequence[Sequence[float]], num_places: int) -> list[list[int]]:
        return [list(range(len(experts))) for experts in load]


class ForgetsTheState(DynamicBatch):
    seen = 0

    def micro_batches(self, lengths: Sequence[int], **rest: Any) -> list[list[int]]:
        self.seen += len(lengths)
        return super().micro_batches(lengths, **rest)

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}


class SaysOneSentence(DynamicBatch):
    def validate(self, config: Any, resizable: Sequence[str]) -> str:
        return "" if resizable else "nobody may join"


WRONG_SCHEDULERS: list[tuple[type[Scheduler[Any]], str, str]] = [
    (SaysOneSentence, "validation", "list of sentences"),
    (DropsTheLast, "micro_batches", "exactly one"),
    (IgnoresParts, "micro_batches", "multiple"),
    (CutsAtRandom, "micro_batches", "two ways"),
    (FailsOnNothing, "micro_batches", "ValueError"),
    (NoBatchAtAll, "generation", "at least 1"),
    (MoreForLarger, "generation", "larger"),
    (NoWorkers, "workers", "at least 1"),
    (PlacesByExpert, "places", "num_places - 1"),
    (ForgetsTheState, "state", "load_state"),
]


@pytest.mark.parametrize(("wrong", "check", "said"), WRONG_SCHEDULERS, ids=[w.__name__ for w, _, _ in WRONG_SCHEDULERS])
def test_a_wrong_scheduler_is_caught_by_its_check(wrong: type[Scheduler[Any]], check: str, said: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_scheduler(wrong)
    assert caught.value.check == check
    assert said in str(caught.value)


def test_a_scheduler_that_decides_nothing_passes_without_a_decision() -> None:
    class Undecided(Scheduler[NoOptions]):
        pass

    assert set(check_scheduler(Undecided).skipped) == {"micro_batches", "generation", "workers", "places"}


class Started(Local):
    group: type[LocalGroup] = LocalGroup

    def start(self, spec: WorkerSpec) -> WorkerGroup:
        found = super().start(spec)
        assert isinstance(found, LocalGroup)
        return self.group(found.role, found.workers)


class OneWorkerOnly(Local):
    def start(self, spec: WorkerSpec) -> WorkerGroup:
        return super().start(dataclasses.replace(spec, count=1))


class RanksFromOne(Local):
    def start(self, spec: WorkerSpec) -> WorkerGroup:
        workers = [spec.factory(**spec.kwargs, rank=rank + 1, world_size=spec.count) for rank in range(spec.count)]
        return LocalGroup(spec.role, workers)


class RefusesAll(Local):
    def validate(self, specs: Sequence[WorkerSpec]) -> list[str]:
        return ["there is no room"]


class CallsRankZero(Started):
    class group(LocalGroup):  # noqa: N801  # it is the attribute that is overridden
        def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            if method in ("generate", "double"):
                return LocalGroup(self.role, self.workers[:1]).call(method, *args, **kwargs)
            return super().call(method, *args, **kwargs)


class SwallowsErrors(Started):
    class group(LocalGroup):  # noqa: N801  # it is the attribute that is overridden
        def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().call(method, *args, **kwargs)
            except Exception:
                return None


class SubmitsTwice(Started):
    class group(LocalGroup):  # noqa: N801  # it is the attribute that is overridden
        def submit(self, method: str, *args: Any, **kwargs: Any) -> Any:
            super().submit(method, *args, **kwargs)
            return super().submit(method, *args, **kwargs)


class PassesFutures(Started):
    class group(LocalGroup):  # noqa: N801  # it is the attribute that is overridden
        def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(value, Future) for value in args):
                raise TypeError(f"{method} cannot use a Future")
            return super().call(method, *args, **kwargs)


class ErrorsWithoutRank(Started):
    class group(LocalGroup):  # noqa: N801  # it is the attribute that is overridden
        def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().call(method, *args, **kwargs)
            except RunError:
                raise
            except Exception as error:
                raise type(error)(*error.args) from None


class CallsAnything(Started):
    class group(LocalGroup):  # noqa: N801  # it is the attribute that is overridden
        def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().call(method, *args, **kwargs)
            except RunError:
                return getattr(self.workers[0], method)(*args, **kwargs)


class StartsLazily(Local):
    def start(self, spec: WorkerSpec) -> WorkerGroup:
        try:
            return super().start(spec)
        except Exception:
            return LocalGroup(spec.role, [object()])


class SaysElsewhere(Local):
    @property
    def shares_memory(self) -> bool:
        return False


class ShutsDownOnce(Local):
    closed = False

    def shutdown(self) -> None:
        assert not self.closed
        self.closed = True


WRONG_EXECUTORS: list[tuple[type[Executor[Any]], str, str]] = [
    (OneWorkerOnly, "start", "size 1"),
    (RanksFromOne, "start", "rank"),
    (RefusesAll, "start", "no room"),
    (CallsRankZero, "dispatch", "a part of the workers"),
    (SubmitsTwice, "submission", "three submitted calls"),
    (PassesFutures, "future_arguments", "cannot use a Future"),
    (SwallowsErrors, "errors", "does not reach the caller"),
    (ErrorsWithoutRank, "errors", "add a note"),
    (CallsAnything, "errors", "without @register"),
    (StartsLazily, "errors", "could not be built"),
    (SaysElsewhere, "memory", "shares_memory"),
    (ShutsDownOnce, "shutdown", "AssertionError"),
]


@pytest.mark.parametrize(("wrong", "check", "said"), WRONG_EXECUTORS, ids=[w.__name__ for w, _, _ in WRONG_EXECUTORS])
def test_a_wrong_executor_is_caught_by_its_check(wrong: type[Executor[Any]], check: str, said: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_executor(wrong)
    assert caught.value.check == check
    assert said in str(caught.value)


class Bonus(Extension[NoOptions]):
    """A right extension: a column of its own."""

    provides = frozenset({"length_bonus"})

    @hookimpl(wrapper=True)
    def rollstock_prepare(self, run: Run, batch: Batch) -> Generator[None, bool, bool]:
        done = yield
        batch["length_bonus"] = 1.0 / batch.lengths.clamp(min=1)
        return done


class NoHook(Extension[NoOptions]):
    pass


class Misspelt(Bonus):
    @hookimpl
    def rollstock_stepend(self, run: Run, step: int) -> None:
        return


class WrongArgument(Bonus):
    @hookimpl
    def rollstock_step_end(self, run: Run, number: int) -> None:
        return


class ProvidesTheCores(Bonus):
    provides = frozenset({"values"})


class NeedsAText(Bonus):
    needs = "old_logprobs"  # type: ignore[assignment]  # the mistake


class NeedsItsOwn(Bonus):
    needs = frozenset({"length_bonus"})


class RefusesWithAText(Bonus):
    def validate(self, config: RunConfig, algorithm: Algorithm[Any]) -> Sequence[str]:
        return "nothing is wrong"


class ProvidesAText(Bonus):
    provides = "length_bonus"  # type: ignore[assignment]  # the mistake


class ProvidesMore(Bonus):
    provides = frozenset({"length_bonus", "width_bonus"})


class DropsTheBatch(Bonus):
    @hookimpl(wrapper=True)
    def rollstock_select(self, run: Run, batch: Batch) -> Generator[None, Batch, None]:
        yield


class MeasuresAtRandom(Bonus):
    @hookimpl
    def rollstock_metrics(self, run: Run, step: int, metrics: Metrics) -> None:
        metrics["mine/noise"] = Metric(random.random())


class StateIsNoJSON(Bonus):
    def state(self) -> dict[str, Any]:
        return {"seen": {1}}


class CountsSteps(Bonus):
    count = 0

    @hookimpl
    def rollstock_metrics(self, run: Run, step: int, metrics: Metrics) -> None:
        self.count += 1
        metrics["mine/count"] = Metric(self.count)


class CountsStepsInState(CountsSteps):
    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.count = state.get("count", 0)


WRONG_EXTENSIONS: list[tuple[type[Extension[Any]], str, str]] = [
    (NoHook, "hooks", "does nothing"),
    (Misspelt, "hooks", "rollstock_step_end"),
    (WrongArgument, "hooks", "number"),
    (ProvidesTheCores, "columns", "values"),
    (NeedsAText, "columns", "needs is"),
    (NeedsItsOwn, "columns", "length_bonus"),
    (RefusesWithAText, "validation", "list of sentences"),
    (ProvidesAText, "columns", "a set"),
    (StateIsNoJSON, "state", "JSON"),
    (ProvidesMore, "run", "width_bonus"),
    (DropsTheBatch, "run", "select"),
    (MeasuresAtRandom, "repetition", "mine/noise"),
    (CountsSteps, "resumption", "mine/count"),
]


@pytest.mark.parametrize(("wrong", "check", "said"), WRONG_EXTENSIONS, ids=[w.__name__ for w, _, _ in WRONG_EXTENSIONS])
def test_a_wrong_extension_is_caught_by_its_check(
    wrong: type[Extension[Any]], check: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConformanceError) as caught:
        skip = {name: "it is tried elsewhere" for name in ("run", "repetition", "resumption") if name != check}
        check_extension(wrong, directory=tmp_path, skip=skip)
    assert caught.value.check == check
    assert said in str(caught.value)


def test_a_right_extension_passes(tmp_path: Path) -> None:
    assert check_extension(CountsStepsInState, directory=tmp_path).skipped == {}
