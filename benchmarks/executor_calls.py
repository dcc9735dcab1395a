"""What a call through the `ray` executor costs beyond a plain Ray call that does the same.

Four workers get a batch of 1 MiB or 64 MiB, scattered by tokens, and each returns one value a trajectory. Through the
executor that is one line. By hand it is a Ray actor, and two ways to feed it: the parts of the batch as arguments, as
Ray's tutorials do, or the columns as numpy arrays, put into the object store once and cut by the workers, which is the
fastest that we know. Both sides share one cluster and take turns; the ratio is of medians.

    python benchmarks/executor_calls.py [--repeats N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from rollstock import Batch, Trajectory, WorkerSpec
from rollstock.dispatch import register, registration, split_call
from rollstock.plugins.executors.ray import Ray, RayConfig

WORKERS = 4
TARGET = 1.2
BYTES_PER_TOKEN = 29  # response, versions, action_mask, rollout_logprobs, old_logprobs, advantages
TOKENS = 512  # of a response


class Work:
    """What the workers do: one number for each trajectory."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank

    @register(dispatch="scatter")
    def total(self, batch: Batch) -> dict[str, list[Tensor]]:
        """The sum of each trajectory's log-probs."""
        parts = batch.flat("old_logprobs").split(batch.lengths.tolist())
        return {"total": [part.sum()[None] for part in parts]}

    @register()
    def close(self) -> None:
        """Nothing to end."""


class ByHand:
    """The same without the executor."""

    def __init__(self) -> None:
        self.work = Work(0, 1)

    def of_part(self, part: Batch) -> Any:
        """For a part of the batch, pickled by Ray."""
        return self.work.total(part)

    def of_arrays(self, arrays: dict[str, Any], lengths: Any, index: Any, mine: Any) -> Any:
        """For the columns of the whole batch and the places of a part's tokens in them."""
        columns = {name: torch.from_numpy(array[index]) for name, array in arrays.items()}
        parts = columns["old_logprobs"].split(lengths[mine].tolist())
        return [float(part.sum()) for part in parts]


def make_batch(num_bytes: int) -> Batch:
    """A batch whose columns weigh `num_bytes`."""
    generator = torch.Generator().manual_seed(0)
    trajectories = []
    left = num_bytes // BYTES_PER_TOKEN
    while left > 0:
        count = min(left, int(torch.randint(TOKENS // 2, TOKENS * 3 // 2, (), generator=generator)))
        trajectories.append(
            Trajectory(
                prompt=torch.arange(64),
                response=torch.arange(count),
                action_mask=torch.ones(count, dtype=torch.bool),
                rollout_logprobs=torch.randn(count, generator=generator),
                versions=torch.zeros(count, dtype=torch.int64),
                group=len(trajectories),
            )
        )
        left -= count
    batch = Batch.from_trajectories(trajectories)
    for name in ("old_logprobs", "advantages"):
        batch.set_flat(name, batch.flat("rollout_logprobs").clone())
    return batch


def by_parts(actors: Sequence[Any], batch: Batch) -> None:
    """Plain Ray, with parts of the batch as arguments."""
    shares = split_call(registration(Work, "total"), len(actors), (batch,))
    ray.get([actor.of_part.remote(*mine) for actor, mine in zip(actors, shares.arguments, strict=True)])


def by_arrays(actors: Sequence[Any], batch: Batch) -> None:
    """Plain Ray, with arrays that are put once."""
    shares = split_call(registration(Work, "total"), len(actors), (batch,))
    names = ("response", "versions", "action_mask", "rollout_logprobs", "old_logprobs", "advantages")
    arrays = ray.put({name: batch.flat(name).numpy() for name in names})
    lengths = batch.lengths.numpy()
    starts = (torch.cumsum(batch.lengths, 0) - batch.lengths).tolist()
    refs = []
    for actor, mine in zip(actors, shares.indices or [], strict=True):
        index = torch.cat([torch.arange(starts[i], starts[i] + int(lengths[i])) for i in mine]).numpy()
        refs.append(actor.of_arrays.remote(arrays, lengths, index, torch.tensor(mine).numpy()))
    ray.get(refs)


def seconds(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The median time of each way, taken in turns after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def main() -> None:
    """Print the times and the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    executor = Ray(RayConfig(dashboard=False, num_cpus=2 * WORKERS, object_store_memory=1 << 30))
    try:
        group = executor.start(WorkerSpec(role="work", factory=Work, count=WORKERS))
        actors = [ray.remote(ByHand).remote() for _ in range(WORKERS)]
        for size in (1, 64):
            batch = make_batch(size << 20)
            ways: dict[str, Callable[[], Any]] = {
                "executor": lambda batch=batch: group.call("total", batch),
                "parts": lambda batch=batch: by_parts(actors, batch),
                "arrays": lambda batch=batch: by_arrays(actors, batch),
            }
            found = seconds(ways, repeats)
            print(f"{size} MiB, {len(batch)} trajectories, {WORKERS} workers, median of {repeats} calls")
            print(f"  executor: {found['executor'] * 1e3:.1f} ms")
            for name, label in (("parts", "plain Ray, parts of the batch"), ("arrays", "plain Ray, arrays put once")):
                print(f"  {label}: {found[name] * 1e3:.1f} ms; ratio {found['executor'] / found[name]:.2f}")
        print(f"the ratio shall be at most {TARGET}")
    finally:
        executor.shutdown()


if __name__ == "__main__":
    main()
