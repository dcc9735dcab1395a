"""The fsdp backend: one transformers model in several processes, which add up their gradients.

For runs that outgrow one device. What is computed is the torch backend's, for each process's share of a batch; torch's
`fully_shard` gathers the weights of a layer when it is needed, and hands each process its part of the gradient.
Starting the processes is left to the executor, sharing out batches to the dispatch of calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rollstock import (
    HEAD_OUTPUTS,
    BackendState,
    Batch,
    Compressor,
    Device,
    LossFunction,
    Metrics,
    ModelSpec,
    Totals,
    Trajectory,
    UserError,
    fingerprint,
)
from rollstock.backends.fsdp import processes
from rollstock.backends.fsdp.compression import GradientCompression
from rollstock.backends.fsdp.config import FSDPConfig
from rollstock.backends.fsdp.optimizer import ShardedOptimizer
from rollstock.backends.fsdp.sharding import SHARD, full_tensor, make_mesh, own_part, shard_network
from rollstock.backends.torch.backend import DTYPES, PackedBackend
from rollstock.backends.torch.network import Network
from rollstock.backends.torch.routing import StreamRouting
from rollstock.compression import Traffic

if TYPE_CHECKING:
    from rollstock import RunConfig


class FSDPBackend(PackedBackend[FSDPConfig]):
    """Holds a part of one model in each process of a role."""

    trains_together = True

    _compressor: Compressor[Any] | None = None
    _compression: GradientCompression | None = None
    _num_passes = 0
    _leave: weakref.finalize[..., FSDPBackend] | None = None

    def validate(self, config: RunConfig, role: str) -> Sequence[str]:
        """See `Backend.validate`."""
        return [*super().validate(config, role), *self.config.problems(config.role(role).count)]

    def share_kept(self, world_size: int) -> float:
        """See `Backend.share_kept`."""
        return self.config.num_replicas(world_size) / world_size

    def use_compressor(self, compressor: Compressor[Any]) -> None:
        """See `Backend.use_compressor`."""
        self._compressor = compressor

    def setup(self, model: ModelSpec, device: Device[Any], *, trainable: bool, total_updates: int) -> None:
        """See `Backend.setup`. Every process builds the whole model in its memory before it keeps a part."""
        for problem in self.config.problems(self.world_size):
            # One process alone can read what several have saved, for an export.
            if self.world_size > 1 or not problem.startswith("backend.replicas"):
                raise UserError(problem)
        processes.join(device, rank=self.rank, world_size=self.world_size, timeout_s=self.config.timeout_s)
        self._leave = weakref.finalize(self, processes.leave)
        super().setup(model, device, trainable=trainable, total_updates=total_updates)

    def update(
        self,
        batch: Batch,
        loss: LossFunction,
        *,
        outputs: Sequence[str],
        temperature: float,
        micro_batches: Sequence[Sequence[int]],
        totals: Totals,
    ) -> Metrics:
        """See `Backend.update`. Every process updates with the gradient of all of them, whatever its own share."""
        self._num_passes = 0
        try:
            metrics = super().update(
                batch, loss, outputs=outputs, temperature=temperature, micro_batches=micro_batches, totals=totals
            )
        except BaseException:
            self._root.reset_iter_state()  # otherwise the next pass would go on in the middle of this one
            raise
        return {**metrics, **self._traffic().metrics()} if self.world_size > 1 else metrics

    def fingerprint(self) -> str:
        """See `Backend.fingerprint`; the same in every process."""
        digits = torch.zeros(32, dtype=torch.uint8, device=self._device.torch_device())
        if self.rank == 0:
            found = fingerprint((name, tensor.cpu()) for name, tensor in self.weights())
            digits = torch.tensor(list(found.encode()), dtype=torch.uint8, device=digits.device)
        else:
            for _ in self.weights():
                pass
        dist.broadcast(digits, src=0)
        return bytes(digits.tolist()).decode()

    def state(self) -> BackendState:
        """See `Backend.state`: whole tensors in the process of rank 0, and none in the others."""
        tensors, values = {"model": self._gathered(self._named())}, {}
        if self._optimizer is not None:
            tensors["optimizer"] = self._gathered(self._optimizer.tensors().items())
            values["optimizer"] = self._optimizer.values()
        if self._compression is not None:
            tensors["compressor"], values["compressor"] = self._compression.state()
        return BackendState(tensors, values)

    def load_state(self, state: BackendState) -> None:
        """See `Backend.load_state`; of a state that any number of processes saved, or the torch backend."""
        super().load_state(state)
        if self._compression is not None and "compressor" in state.values:
            self._compression.load_state(state.tensors["compressor"], state.values["compressor"], self.rank)

    def close(self) -> None:
        """See `Backend.close`."""
        super().close()
        if self._leave is not None:
            self._leave()

    def _first_device(self) -> torch.device:
        return torch.device("cpu")  # the whole model need not fit the device

    def _choose_layers(self, network: Network) -> None:
        """Modules, which is what is sharded."""

    def _spread(self) -> None:
        device = self._device.torch_device()
        replicas = self.config.num_replicas(self.world_size)
        with processes.on_loopback():
            mesh = make_mesh(device, self.world_size, replicas)
        compresses = self._compressor is not None
        sharded = shard_network(
            self._network,
            mesh[SHARD] if compresses and replicas > 1 else mesh,
            compute_dtype=DTYPES[self.config.compute_dtype],
            offload=self.config.offload_params,
        )
        if self._compressor is not None:
            self._compression = GradientCompression(self._compressor, mesh)
            self._compression.attach(sharded)

    def _make_optimizer(self, total_updates: int) -> ShardedOptimizer:
        return ShardedOptimizer(self._trained(), self.config, total_updates, reports=self.rank == 0)

    def _slices(self, batch: Batch, micro_batches: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], Batch]]:
        """The slices, and then as many passes of no consequence as other processes have more: whoever goes through the
        model, or back, waits in each layer for the others. Gradients travel in the last pass."""
        root = self._root
        cuts = [(indices, batch.select(indices)) for indices in micro_batches]
        runs = [bool(cut.flat("action_mask").any()) for _, cut in cuts]  # the others do not reach the model
        total, done = self._most(sum(runs)), 0
        self._num_passes = total
        for (indices, cut), through_model in zip(cuts, runs, strict=True):
            if through_model:
                done += 1
                _prepare_pass(root, is_last=done == total)
            yield indices, cut
        for number in range(done + 1, total + 1):
            _prepare_pass(root, is_last=number == total)
            self._idle_pass()
        root.reshard()  # without a backward pass, it would go on with the weights that it has gathered

    def _idle_pass(self) -> None:
        """Go through the model, and back where there are gradients, with one token and no loss."""
        with self._pass(_idle_batch()) as (part, layout, _):
            outputs = self._outputs(part, layout, sorted(HEAD_OUTPUTS[self._network.head]), 1.0)
            self._backward(_nothing(outputs), outputs)

    def _backward(self, loss: Tensor, outputs: Mapping[str, Tensor]) -> None:
        if not loss.requires_grad:  # a constant; the other processes wait all the same
            loss = loss + _nothing(outputs)
        super()._backward(loss, outputs)

    def _finish_routing(self, routing: StreamRouting) -> Metrics:
        metrics = routing.finish_update(self._add_up)
        return metrics if self.rank == 0 else {}

    def _full(self, tensor: Tensor) -> Tensor:
        return full_tensor(tensor, self._device.torch_device())

    def _part(self, full: Tensor, like: Tensor) -> Tensor:
        return own_part(full, like)

    def _gathered(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Whole tensors, one after the other, where they are wanted."""
        whole = ((name, self._full(tensor)) for name, tensor in named)
        return {name: tensor.cpu() for name, tensor in whole if self.rank == 0}

    def _traffic(self) -> Traffic:
        """What this process has sent of gradients in an update; without a compressor, what a ring sends."""
        if self._num_passes == 0:
            return Traffic()
        replicas = self.config.num_replicas(self.world_size)
        shards = self.world_size // replicas
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in self._trained())
        within = (shards - 1) * size // shards
        between = 2 * (replicas - 1) * size // replicas // shards
        if self._compression is None:
            return Traffic(within + between, within + between)
        return self._compression.take_traffic() + (Traffic(within, within) if replicas > 1 else Traffic())

    def _most(self, number: int) -> int:
        """The largest of the numbers that the processes give."""
        value = torch.tensor(number, device=self._device.torch_device())
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value)

    def _add_up(self, counts: Tensor) -> None:
        """Turn counts, in place, into the sum of those of all processes."""
        every = counts.to(self._device.torch_device())
        dist.all_reduce(every)
        counts.copy_(every)

    @property
    def _root(self) -> FSDPModule:
        return cast(FSDPModule, self._network)


def _prepare_pass(root: FSDPModule, *, is_last: bool) -> None:
    root.set_requires_gradient_sync(is_last)
    root.set_is_last_backward(is_last)


def _nothing(outputs: Mapping[str, Tensor]) -> Tensor:
    """0, with the gradient 0 for all that the model gave."""
    return torch.stack([(output * 0.0).sum() for output in outputs.values()]).sum()


def _idle_batch() -> Batch:
    """One trajectory of one chosen token."""
    return Batch.from_trajectories(
        [
            Trajectory(
                prompt=torch.zeros(1, dtype=torch.int64),
                response=torch.zeros(1, dtype=torch.int64),
                action_mask=torch.ones(1, dtype=torch.bool),
                rollout_logprobs=torch.zeros(1),
                versions=torch.zeros(1, dtype=torch.int64),
                group=0,
            )
        ]
    )
