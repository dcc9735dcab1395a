"""How long SmolLM2's weights take from a trainer to two generators in processes of their own.

Each way is a whole sync as a run makes it: the weights reach both engines, and the fingerprints of both sides are
compared. The peer is plain Ray without any check: the trainer's state dict as numpy arrays through `ray.put` (which a
returned value goes through) and `ray.get`, then `load_state_dict`. All ways take turns in one go; the ratio is of
medians.

    python benchmarks/weight_sync.py [--model DIRECTORY] [--repeats N] [--chunk-mib N] [--adapters]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
import yaml

from rollstock.build import choose, worker_spec
from rollstock.config import load_config
from rollstock.dispatch import register
from rollstock.interfaces.executor import WorkerSpec
from rollstock.interfaces.transport import Transport
from rollstock.manager import make_manager
from rollstock.metrics import metric_values
from rollstock.plugins.executors.ray import Ray, RayConfig
from rollstock.roles.model import ModelWorker
from rollstock.roles.rollout import RolloutWorker
from rollstock.weightsync.deliver import sync_weights
from rollstock.weightsync.intake import WeightIntake
from rollstock.weightsync.receiver import WeightReceiver
from rollstock.weightsync.sender import WeightSender
from rollstock.weightsync.source import WeightSource

WAYS = ("store", "shm", "zmq")
TARGET_S = 1.0
GENERATORS = 2
ROOT = Path(__file__).resolve().parents[1]


class Trainer(ModelWorker):
    """An actor that changes its transport between syncs."""

    @register()
    def use(self, way: str, chunk_mib: int) -> None:
        """Hand weights to another transport from now on; `store` is the executor's."""
        self.source.close()
        sender = None if way == "store" else WeightSender(_transport(way), chunk_mib << 20)
        self.source = WeightSource(self.backend, sender, is_counted=True)

    @register()
    def nudge(self) -> None:
        """Change every weight that is trained, as an update does."""
        with torch.no_grad():
            for parameter in self.backend._network.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.0001)


class Generator(RolloutWorker):
    """A rollout worker that does."""

    @register()
    def use(self, way: str) -> None:
        """Take weights from another transport from now on."""
        self.intake.close()
        receiver = None if way == "store" else WeightReceiver(_transport(way), self.rank, max_resends=3, timeout_s=60.0)
        self.intake = WeightIntake(self.engine, receiver)


def _transport(way: str) -> Transport[Any]:
    found: Transport[Any] = make_manager().create("transport", {"name": way})
    return found


class ByHand:
    """The same in plain Ray: a model, whose state dict goes out or comes in."""

    def __init__(self, path: str, threads: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def give(self) -> dict[str, Any]:
        """The weights, tied ones once."""
        return {name: parameter.detach().numpy() for name, parameter in self.model.named_parameters()}

    def take(self, weights: dict[str, Any]) -> bool:
        """Load them."""
        self.model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()}, strict=False)
        return True


def make_run(arguments: argparse.Namespace, folder: Path) -> tuple[Any, list[WorkerSpec]]:
    """What `sync_weights` needs of a run, and the workers to start."""
    lora = {"lora": {"rank": 16}} if arguments.adapters else {}
    sections = {
        "model": {"path": arguments.model},
        "algorithm": "grpo",
        "environment": "arithmetic",
        "backend": {"name": "torch", **lora},
        "weight_sync": {"content": "adapters" if arguments.adapters else "full"},
        "run": {"directory": str(folder / "run")},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    config = load_config(folder / "run.yaml", [])
    tokenizer = choose(config).tokenizer
    specs = []
    for role, worker, count in (("actor", Trainer, 1), ("rollout", Generator, GENERATORS)):
        kwargs = worker_spec(config, role, tokenizer).kwargs
        specs.append(WorkerSpec(role=role, factory=worker, kwargs=kwargs, count=count))
    recorded: dict[str, float] = {}
    run = types.SimpleNamespace(
        config=config,
        version=0,
        fingerprint="",
        pipeline=types.SimpleNamespace(runs_ahead=False),
        recorded=recorded,
        record=lambda metrics: recorded.update(metric_values(metrics)),
    )
    return run, specs


def by_hand(trainer: Any, generators: list[Any]) -> None:
    """The peer's sync."""
    weights = trainer.give.remote()
    ray.get([generator.take.remote(weights) for generator in generators])


def measure(run: Any, peer: Callable[[], None], arguments: argparse.Namespace) -> None:
    """Sync by every way in turns with the peer, and print what it took."""
    plain: list[float] = []
    for way in WAYS:
        run.config.transport = None if way == "store" else {"name": way}
        run.roles["actor"].call("use", way, arguments.chunk_mib)
        run.roles["rollout"].call("use", way)
        times: list[float] = []
        before = len(plain)
        for _ in range(1 + arguments.repeats):
            run.roles["actor"].call("nudge")
            times.append(timed(lambda: sync_weights(run)))
            plain.append(timed(peer))
        median, base = statistics.median(times[1:]), statistics.median(plain[before + 1 :])
        print(
            f"  {way}: {median:.2f} s ({min(times[1:]):.2f} to {max(times[1:]):.2f}; the first {times[0]:.2f}), "
            f"{arguments.num_bytes / median / 1e9:.2f} GB/s to each, {run.recorded['sync/bytes'] / 1e9:.3f} GB sent; "
            f"plain Ray {base:.2f} s, ratio {median / base:.2f}"
        )


def timed(function: Callable[[], None]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def main() -> None:
    """Print seconds, throughput and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--chunk-mib", type=int, default=16)
    parser.add_argument("--adapters", action="store_true", help="send adapters of rank 16 alone")
    arguments = parser.parse_args()
    executor = Ray(RayConfig(dashboard=False, object_store_memory=4 << 30))
    with tempfile.TemporaryDirectory() as folder:
        run, specs = make_run(arguments, Path(folder))
        try:
            executor.prepare(specs)
            run.executor = executor
            run.roles = {spec.role: executor.start(spec) for spec in specs}
            actors = [
                ray.remote(ByHand).remote(arguments.model, torch.get_num_threads()) for _ in range(1 + GENERATORS)
            ]
            arguments.num_bytes = sum(array.nbytes for array in ray.get(actors[0].give.remote()).values())
            print(
                f"{arguments.num_bytes / 1e9:.2f} GB to {GENERATORS} generators, chunks of {arguments.chunk_mib} MiB, "
                f"{'adapters alone' if arguments.adapters else 'all weights'}, median of {arguments.repeats} syncs"
            )
            measure(run, lambda: by_hand(actors[0], actors[1:]), arguments)
            print(f"a sync shall take less than {TARGET_S:.0f} s")
        finally:
            executor.shutdown()


if __name__ == "__main__":
    main()
