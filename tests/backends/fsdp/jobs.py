"""What the processes of these tests do: one function a job, called in every process of it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollstock import Batch, Metrics
from rollstock.backends.fsdp import processes
from rollstock.build import choose, worker_spec
from rollstock.dispatch import gather, registration, split_call
from rollstock.hardware.cpu import CPU
from rollstock.interfaces.backend import BackendState
from rollstock.metrics import metric_values
from rollstock.micro import Totals
from rollstock.roles.model import ModelWorker
from rollstock.testing import make_batch, tiny_config
from rollstock.testing.batches import columns_of

MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}


class Group:
    """The workers of a role, seen from the process of one of them: calls are split and gathered as an executor does."""

    def __init__(self, worker: ModelWorker, rank: int, world_size: int) -> None:
        self.worker, self.rank, self.world_size = worker, rank, world_size

    def call(self, method: str, *args: Any) -> Any:
        """What the controller would be given; the same in every process."""
        shares = split_call(registration(ModelWorker, method, self.worker.role), self.world_size, args)
        found = getattr(self.worker, method)(*shares.arguments[self.rank])
        replies: list[Any] = [None] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(replies, found)
        else:
            replies = [found]
        return gather(replies, shares)


@contextlib.contextmanager
def together(rank: int, world_size: int) -> Iterator[None]:
    """Processes that stay together for several workers, one after the other."""
    processes.join(CPU(), rank=rank, world_size=world_size, timeout_s=60)
    try:
        yield
    finally:
        processes.leave()


def make_group(rank: int, world_size: int, folder: Path, *, role: str = "actor", **sections: Any) -> Group:
    """A worker in this process, and those of the same role in the others."""
    given = {"model": {"config": MODEL, "tokenizer": {"characters": "0123456789+="}}, **sections}
    given["backend"] = {"name": "fsdp", "learning_rate": 1e-2, **given.get("backend", {})}
    given.setdefault("algorithm", {"name": "grpo", "group_size": 4})
    config = tiny_config(folder / "run", given, ["train.steps=10"])
    spec = worker_spec(config, role, choose(config).tokenizer)
    return Group(spec.factory(**spec.kwargs, rank=rank, world_size=world_size), rank, world_size)


def a_batch(num_groups: int = 3) -> Batch:
    """Uneven responses, one of them without a token of the policy's, and what algorithms need to know of them."""
    batch = make_batch(4, num_groups=num_groups, vocab_size=13)
    batch.flat("action_mask")[:5] = False
    for name, column in columns_of(batch).items():
        if name in ("old_logprobs", "values"):
            batch.set_flat(name, column)
    generator = torch.Generator().manual_seed(5)
    batch["advantages"] = torch.randn(batch.mask.shape, generator=generator) * batch.mask
    batch["returns"] = torch.randn(batch.mask.shape, generator=generator) * batch.mask
    return batch


def train(group: Group, batch: Batch, updates: int) -> list[dict[str, float]]:
    """So many updates on one batch; the metrics of each."""
    curve = []
    for _ in range(updates):
        metrics: Metrics = group.call(
            "update", batch, Totals.of(batch, response_limit=16), group.worker.algorithm.state()
        )
        curve.append(metric_values(metrics))
    return curve


def learn(
    rank: int,
    world_size: int,
    folder: Path,
    *,
    cases: dict[str, dict[str, Any]],
    updates: int = 3,
    num_groups: int = 3,
) -> dict[str, Any]:
    """Train one worker after the other, each from its sections of a config; returns the curve, the columns and the
    state of each."""
    found = {}
    with together(rank, world_size):
        for name, sections in cases.items():
            group = make_group(rank, world_size, folder, **sections)
            batch = a_batch(num_groups)
            head = "values" if group.worker.role == "critic" else "logprobs"
            curve = train(group, batch, updates)
            column = group.call("forward", batch, [head])[head]
            weights = dict(group.call("weights"))
            fingerprint = group.call("fingerprint")
            state: BackendState = group.call("state")
            found[name] = {
                "curve": curve,
                "column": column,
                "weights": {key: value.clone() for key, value in weights.items()},
                "fingerprint": fingerprint,
                "tensors": {part: {k: v.clone() for k, v in each.items()} for part, each in state.tensors.items()},
                "values": state.values,
            }
            group.call("close")
    return found
