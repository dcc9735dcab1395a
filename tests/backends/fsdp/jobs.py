"""What the processes of these tests do: one function a job, called in every process of it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from rollstock import HEAD_OUTPUTS, Batch, Loss, Metrics
from rollstock.backends.fsdp import processes
from rollstock.backends.fsdp.sharding import make_mesh
from rollstock.build import choose, worker_spec
from rollstock.dispatch import gather, registration, split_call
from rollstock.hardware.cpu import CPU
from rollstock.interfaces.backend import BackendState
from rollstock.metrics import metric_values
from rollstock.micro import MicroBatch, Totals
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
        replies: list[Any] = [found] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(replies, found)
        return gather(replies, shares)


@contextlib.contextmanager
def together(rank: int, world_size: int) -> Iterator[None]:
    """Processes that stay together for several workers, one after the other."""
    processes.join(CPU(), rank=rank, world_size=world_size, timeout_s=600)
    try:
        yield
    finally:
        processes.leave()


def make_group(rank: int, world_size: int, folder: Path, *, role: str = "actor", **sections: Any) -> Group:
    """A worker in this process, and those of the same role in the others."""
    given = {"model": {"config": MODEL, "tokenizer": {"characters": "0123456789+="}}, **sections}
    given["backend"] = {"name": "fsdp", "learning_rate": 1e-2, **given.get("backend", {})}
    given.setdefault("algorithm", {"name": "grpo", "group_size": 4})
    given["roles"] = {role: {"count": world_size}}
    config = tiny_config(folder / "run", given, ["train.steps=10"])
    parts = choose(config)
    spec = worker_spec(config, role, parts.tokenizer, head=parts.algorithm.actor_head())
    return Group(spec.factory(**spec.kwargs, rank=rank, world_size=world_size), rank, world_size)


def a_batch(group: Group) -> Batch:
    """Three groups of uneven responses, two of them without a token of the policy's, and what algorithms need of
    them."""
    batch = make_batch(4, num_groups=3, vocab_size=13)
    batch.flat("action_mask")[:6] = False
    for name, column in columns_of(batch).items():
        if name in ("old_logprobs", "values"):
            batch.set_flat(name, column)
    generator = torch.Generator().manual_seed(5)
    batch["advantages"] = torch.randn(batch.mask.shape, generator=generator) * batch.mask
    batch["returns"] = torch.randn(batch.mask.shape, generator=generator) * batch.mask
    batch.whole_groups = group.worker.algorithm.whole_groups
    return batch


def train(group: Group, batch: Batch, updates: int) -> list[dict[str, float]]:
    """So many updates on one batch; the metrics of each."""
    curve = []
    for _ in range(updates):
        totals, state = Totals.of(batch, response_limit=16), group.worker.algorithm.state()
        metrics: Metrics = group.call("update", batch, totals, state)
        curve.append(metric_values(metrics))
    return curve


def look(group: Group, batch: Batch) -> dict[str, Any]:
    """What the model says of a batch, its weights, their fingerprint, and its state."""
    output = sorted(HEAD_OUTPUTS[group.worker.backend._network.head])[-1]
    weights = dict(group.worker.backend.weights())
    state: BackendState = group.call("state")
    return {
        "column": group.call("forward", batch, [output])[output],
        "weights": {name: tensor.clone() for name, tensor in weights.items()},
        "fingerprint": group.call("fingerprint"),
        "tensors": {part: {k: v.clone() for k, v in each.items()} for part, each in state.tensors.items()},
        "values": state.values,
    }


def learn(
    rank: int, world_size: int, folder: Path, *, cases: dict[str, dict[str, Any]], updates: int = 3
) -> dict[str, Any]:
    """Train one worker after the other, each made from sections of a config."""
    found = {}
    with together(rank, world_size):
        for name, sections in cases.items():
            group = make_group(rank, world_size, folder, **sections)
            batch = a_batch(group)
            found[name] = {"curve": train(group, batch, updates), **look(group, batch)}
            group.call("close")
    return found


def save(rank: int, world_size: int, folder: Path, *, file: str, sections: dict[str, Any]) -> list[dict[str, float]]:
    """Train, keep the state in a file, and go on; returns the metrics of what came after."""
    with together(rank, world_size):
        group = make_group(rank, world_size, folder, **sections)
        batch = a_batch(group)
        train(group, batch, 2)
        state: BackendState = group.call("state")
        if rank == 0:
            torch.save((state.tensors, state.values), folder / file)
        return [*train(group, batch, 2), {"fingerprint": group.call("fingerprint")}]


def load(rank: int, world_size: int, folder: Path, *, file: str, sections: dict[str, Any]) -> list[dict[str, float]]:
    """Go on from a state in a file; returns the metrics."""
    with together(rank, world_size):
        group = make_group(rank, world_size, folder, **sections)
        tensors, values = torch.load(folder / file)
        group.call("load_state", BackendState(tensors, values))
        return [*train(group, a_batch(group), 2), {"fingerprint": group.call("fingerprint")}]


def accumulate(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Updates of many micro-batches; how often gradients were sent, and what a loss that fails leaves behind."""
    reduced = []
    reduce = _fsdp_param_group.foreach_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        reduced.append(1)
        return reduce(*args, **kwargs)

    with together(rank, world_size), mock.patch.object(_fsdp_param_group, "foreach_reduce", counted):
        small = {"scheduler": {"name": "dynamic_batch", "tokens_per_micro_batch": 12}}
        group = make_group(rank, world_size, folder, **small)
        batch = a_batch(group)
        train(group, batch, 1)
        num_reduced = len(reduced)
        own = group.worker._actor_loss

        def failing(micro: MicroBatch) -> Loss:
            raise ArithmeticError("no loss")

        group.worker._actor_loss = failing
        try:
            group.worker.update(batch, Totals.of(batch, response_limit=16), {})
        except ArithmeticError:
            group.worker._actor_loss = own
        num_modules = sum(1 for module in group.worker.backend._network.modules() if hasattr(module, "unshard"))
        return {"reduced": num_reduced, "modules": num_modules, "after": train(group, batch, 2)}


def refuse(rank: int, world_size: int, folder: Path) -> list[str]:
    """What is said of processes and options that cannot be."""
    said = []
    with together(rank, world_size):
        for count, options in ((world_size + 1, {}), (world_size, {"sharding_strategy": "HYBRID", "replicas": 3})):
            try:
                make_group(rank, count, folder, backend=options)
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def listen(rank: int, world_size: int, folder: Path) -> set[str]:
    """The addresses on which this process listens, in hexadecimal, as the kernel of Linux writes them."""
    with together(rank, world_size):
        make_mesh(torch.device("cpu"), world_size, world_size)
        dist.barrier()
        own = set()
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                own.add(descriptor.readlink().name)
        rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
        found = {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}
        dist.barrier()
        return found


def warm(folder: Path) -> None:
    """Import whatever a job imports late, in the process that the others part from."""
    group = make_group(0, 1, folder, role="reference", backend={"name": "torch", "layers": "modules"})
    group.call("forward", a_batch(group), ["logprobs"])
