"""Every hook of the contract is exercised: providers by a plugin of each kind, the others by a run that is recorded."""

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollstock import (
    Algorithm,
    Backend,
    Batch,
    Compressor,
    Device,
    Environment,
    Executor,
    Extension,
    Loss,
    Metric,
    Metrics,
    MicroBatch,
    NoOptions,
    Payload,
    Plugin,
    Reward,
    Rollout,
    Router,
    RouterCall,
    Routing,
    Run,
    Sample,
    Scheduler,
    Split,
    Task,
    Tracker,
    Transport,
    hookimpl,
    hookspecs,
)
from rollstock.interfaces.transport import Buffer
from rollstock.kinds import KINDS
from rollstock.launch import resume
from rollstock.manager import PluginManager
from rollstock.testing import installed, make_router_call, read_metrics, tiny_run
from rollstock.testing.install import provider_module

HOOKS = [name for name in vars(hookspecs) if name.startswith("rollstock_")]
PROVIDERS = [kind.provider for kind in KINDS.values()]
WORKERS = {"worker_failed", "worker_started"}
LIFE = [name for name in HOOKS if name not in PROVIDERS]
STAGES = [name for name in LIFE if getattr(getattr(hookspecs, name), "rollstock_spec")["firstresult"]]  # noqa: B009


class Diary:
    """What was called, in order; outside of the instances, which a run makes itself."""

    entries: list[str] = []  # noqa: RUF012  # shared on purpose


class Recorder(Extension[NoOptions]):
    """Implements every lifecycle hook: listens where it can, and wraps each stage."""

    provides = frozenset({"diary"})

    @hookimpl
    def rollstock_run_start(self, run: Run) -> None:
        Diary.entries.append("run_start")

    @hookimpl(wrapper=True)
    def rollstock_generate(self, run: Run, tasks: Sequence[Task]) -> Generator[None, Batch, Batch]:
        batch = yield from self._around("generate")
        assert len(batch) == len(tasks) * run.algorithm.samples_per_prompt
        return batch

    @hookimpl(wrapper=True)
    def rollstock_score(self, run: Run, batch: Batch) -> Generator[None, bool, bool]:
        done = yield from self._around("score")
        assert "scores" in batch
        return done

    @hookimpl(wrapper=True)
    def rollstock_select(self, run: Run, batch: Batch) -> Generator[None, Batch, Batch]:
        kept = yield from self._around("select")
        assert isinstance(kept, Batch)
        return kept

    @hookimpl(wrapper=True)
    def rollstock_prepare(self, run: Run, batch: Batch) -> Generator[None, bool, bool]:
        done = yield from self._around("prepare")
        batch["diary"] = torch.ones(len(batch))
        return done

    @hookimpl(wrapper=True)
    def rollstock_advantages(self, run: Run, batch: Batch) -> Generator[None, bool, bool]:
        done = yield from self._around("advantages")
        assert batch.advantages.shape == batch.mask.shape
        return done

    @hookimpl(wrapper=True)
    def rollstock_update(self, run: Run, batch: Batch) -> Generator[None, Metrics, Metrics]:
        metrics = yield from self._around("update")
        return {**metrics, "diary/updated": Metric(len(batch), 1.0, "sum")}

    @hookimpl(wrapper=True)
    def rollstock_sync(self, run: Run) -> Generator[None, bool, bool]:
        before = run.version
        done = yield from self._around("sync")
        assert run.version == before + 1
        return done

    @hookimpl
    def rollstock_metrics(self, run: Run, step: int, metrics: Metrics) -> None:
        Diary.entries.append(f"metrics {step}")
        metrics["diary/entries"] = Metric(len(Diary.entries), 1.0, "last")

    @hookimpl
    def rollstock_evaluation_end(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        assert "eval/greedy/reward_mean" in metrics
        Diary.entries.append(f"evaluation_end {step}")

    @hookimpl
    def rollstock_checkpoint_saved(self, run: Run, step: int, path: Path) -> None:
        assert path.is_dir()
        Diary.entries.append(f"checkpoint_saved {step}")

    @hookimpl
    def rollstock_step_end(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        assert metrics["diary/updated"] > 0
        Diary.entries.append(f"step_end {step}")

    @hookimpl
    def rollstock_worker_failed(self, run: Run, role: str, rank: int, error: BaseException) -> None:
        Diary.entries.append(f"worker_failed {role} {rank}: {error}")

    @hookimpl
    def rollstock_worker_started(self, run: Run, role: str, rank: int) -> None:
        Diary.entries.append(f"worker_started {role} {rank}")

    @hookimpl
    def rollstock_run_end(self, run: Run, status: str) -> None:
        Diary.entries.append(f"run_end {status}")

    def _around(self, stage: str) -> Generator[None, Any, Any]:
        Diary.entries.append(stage)
        result = yield
        Diary.entries.append(f"{stage} done")
        return result


@pytest.fixture(autouse=True)
def _blank_diary() -> None:
    Diary.entries.clear()


def both(*stages: str) -> list[str]:
    """A stage and its end, for each."""
    return [entry for stage in stages for entry in (stage, f"{stage} done")]


STEP = both("generate", "score", "select", "prepare", "advantages", "update", "sync")


def test_the_recorder_implements_every_lifecycle_hook() -> None:
    assert {name for name in dir(Recorder) if name.startswith("rollstock_")} == set(LIFE)
    assert len(STAGES) == 7


def test_a_run_fires_its_hooks_in_the_order_of_the_contract(tmp_path: Path) -> None:
    with installed("extension", "recorder", Recorder):
        tiny_run(tmp_path / "run", {"extensions": ["recorder"]}, ["checkpoint.every_steps=1", "evaluation.every=1"])
    first = [*STEP, "metrics 1", "evaluation_end 1", "step_end 1", "checkpoint_saved 1"]
    second = [*STEP, "metrics 2", "evaluation_end 2", "step_end 2", "checkpoint_saved 2"]
    assert Diary.entries == ["run_start", *both("sync"), "evaluation_end 0", *first, *second, "run_end finished"]
    fired = {entry.split()[0] for entry in Diary.entries}
    # A worker that fails needs an executor that notices; its hooks have a test of their own below.
    assert {f"rollstock_{name}" for name in fired} == set(LIFE) - {f"rollstock_{name}" for name in WORKERS}
    order = [name.removeprefix("rollstock_") for name in LIFE]
    seen = [entry.split()[0] for entry in ["run_start", *first, "run_end"] if not entry.endswith("done")]
    assert seen == [name for name in order if name not in WORKERS]


def test_what_wrappers_return_reaches_the_metrics(tmp_path: Path) -> None:
    with installed("extension", "recorder", Recorder):
        run = tiny_run(tmp_path / "run", {"extensions": ["recorder"]}, ["train.steps=1"]).directory
    metrics = next(row["metrics"] for row in read_metrics(run) if "metrics" in row)
    assert metrics["diary/updated"] == 16
    assert metrics["diary/entries"] == Diary.entries.index("metrics 1") + 1


def test_a_failed_worker_and_a_new_one_are_told_to_those_who_listen(rollstock_manager: PluginManager) -> None:
    rollstock_manager.add("extension", "recorder", provider_module("extension", Recorder, "recorder_module"))
    rollstock_manager.create("extension", {"name": "recorder"})
    rollstock_manager.hook.rollstock_worker_failed(run=None, role="rollout", rank=3, error=RuntimeError("gone"))
    rollstock_manager.hook.rollstock_worker_started(run=None, role="rollout", rank=3)
    assert Diary.entries == ["worker_failed rollout 3: gone", "worker_started rollout 3"]


def test_a_run_that_fails_says_so_at_its_end(tmp_path: Path) -> None:
    class Fails(Extension[NoOptions]):
        @hookimpl
        def rollstock_step_end(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
            raise ValueError("not like this")

    with (
        installed("extension", "recorder", Recorder),
        installed("extension", "fails", Fails),
        pytest.raises(ValueError, match="not like this") as caught,
    ):
        tiny_run(tmp_path / "run", {"extensions": ["recorder", "fails"]})
    assert Diary.entries[-1] == "run_end failed"
    assert "extension:fails" in "\n".join(caught.value.__notes__)


def test_a_resumed_run_starts_anew_at_its_checkpoint(tmp_path: Path) -> None:
    with installed("extension", "recorder", Recorder):
        run = tiny_run(tmp_path / "run", {"extensions": ["recorder"]}, ["checkpoint.every_steps=1"]).directory
        Diary.entries.clear()
        resume(run, step=1)
    assert Diary.entries[:4] == ["run_start", "sync", "sync done", "generate"]
    assert [entry for entry in Diary.entries if entry.startswith("metrics")] == ["metrics 2"]


def test_an_extension_may_answer_in_place_of_a_stage(tmp_path: Path) -> None:
    class Replaces(Extension[NoOptions]):
        @hookimpl
        def rollstock_score(self, run: Run, batch: Batch) -> bool:
            batch["scores"] = torch.arange(len(batch)).float()
            batch["scored"] = torch.ones(len(batch), dtype=torch.bool)
            return True

    with installed("extension", "replaces", Replaces):
        run = tiny_run(tmp_path / "run", {"extensions": ["replaces"]}, ["train.steps=1"]).directory
    metrics = next(row["metrics"] for row in read_metrics(run) if "metrics" in row)
    assert metrics["reward/max"] == 15
    assert "reward/num_unscored" not in metrics  # the core's own stage was not asked


# A toy of each kind, driven through its provider hook.


class ToyAlgorithm(Algorithm[NoOptions]):
    def advantages(self, batch: Batch) -> Tensor:
        return batch.scores[:, None] * batch.mask

    def loss(self, micro: MicroBatch) -> Loss:
        return micro.loss(-micro.advantages * micro.logprobs)


class ToyEnvironment(Environment[NoOptions]):
    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        return Task(id=f"{split}-{index}", prompt=str(index))


class ToyReward(Reward[NoOptions]):
    def score(self, sample: Sample) -> float:
        return float(len(sample.response))


class ToyRouter(Router[NoOptions]):
    def route(self, call: RouterCall) -> Routing:
        experts = call.choose()
        return Routing(experts=experts, weights=call.weights(experts))


class ToyCompressor(Compressor[NoOptions]):
    def compress(self, tensor: Tensor, *, key: str) -> Payload:
        return Payload(tensors={key: tensor.half()}, shape=tuple(tensor.shape), dtype=tensor.dtype)

    def decompress(self, payload: Payload) -> Tensor:
        return next(iter(payload.tensors.values())).to(payload.dtype)


class ToyTransport(Transport[NoOptions]):
    boxes: dict[str, list[list[memoryview]]] = {}  # noqa: RUF012  # what endpoints share

    def bind(self, name: str) -> str:
        self.boxes[name] = []
        return name

    def send(self, address: str, buffers: Sequence[Buffer], *, timeout: float | None = None) -> None:
        self.boxes[address].append([memoryview(bytes(buffer)) for buffer in buffers])

    def receive(self, name: str, *, timeout: float | None = None) -> list[memoryview]:
        return self.boxes[name].pop(0)

    def close(self) -> None:
        self.boxes.clear()


def finished(interface: type[Plugin[Any]]) -> type[Plugin[Any]]:
    """A toy of an interface with more methods than a test needs: each of them answers with its name."""
    abstract: frozenset[str] = getattr(interface, "__abstractmethods__", frozenset())
    methods: dict[str, Any] = {}
    for name in abstract:
        answer = _answer(name)
        methods[name] = property(answer) if isinstance(inspect.getattr_static(interface, name), property) else answer
    return type(f"Toy{interface.__name__}", (interface,), methods)


def _answer(name: str) -> Callable[..., str]:
    return lambda self, *arguments, **options: name


TOYS: dict[str, type[Plugin[Any]]] = {
    "algorithm": ToyAlgorithm,
    "environment": ToyEnvironment,
    "reward": ToyReward,
    "router": ToyRouter,
    "compressor": ToyCompressor,
    "transport": ToyTransport,
    "extension": Recorder,
    **{
        kind: finished(interface)
        for kind, interface in {
            "backend": Backend,
            "rollout": Rollout,
            "device": Device,
            "scheduler": Scheduler,
            "executor": Executor,
            "tracker": Tracker,
        }.items()
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_provider_hook_of_each_kind_gives_a_plugin(kind: str, rollstock_manager: PluginManager) -> None:
    toy = TOYS[kind]
    rollstock_manager.add(kind, "toy", provider_module(kind, toy, f"toy_{kind}"))
    interface: Any = KINDS[kind].interface_class()
    made = rollstock_manager.create_as(interface, {"name": "toy"})
    assert type(made) is toy
    assert made.plugin_name == "toy"
    assert getattr(rollstock_manager.hook, KINDS[kind].provider)() == [toy]


def test_a_router_a_compressor_and_a_transport_made_by_name_work(rollstock_manager: PluginManager) -> None:
    for kind in ("router", "compressor", "transport"):
        rollstock_manager.add(kind, "toy", provider_module(kind, TOYS[kind], f"toy_{kind}"))
    router = rollstock_manager.create_as(Router, {"name": "toy"})
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    routing = router.route(make_router_call(logits, top_k=2))
    assert routing.experts.tolist() == [[1, 2]]
    compressor = rollstock_manager.create_as(Compressor, {"name": "toy"})
    payload = compressor.compress(torch.ones(4), key="weight")
    assert payload.num_bytes == 8
    assert torch.equal(compressor.decompress(payload), torch.ones(4))
    transport = rollstock_manager.create_as(Transport, {"name": "toy"})
    address = transport.bind("inbox")
    transport.send(address, [b"hello"])
    assert bytes(transport.receive("inbox")[0]) == b"hello"
