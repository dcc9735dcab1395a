"""The roles that hold a model: actor, critic and reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rollstock.answers import micro_batches
from rollstock.batch import Batch
from rollstock.dispatch import register
from rollstock.interfaces.algorithm import Algorithm
from rollstock.interfaces.backend import Backend, BackendState
from rollstock.interfaces.compressor import Compressor
from rollstock.interfaces.device import Device
from rollstock.interfaces.model import HEAD_OUTPUTS, ModelSpec
from rollstock.interfaces.router import Router
from rollstock.interfaces.scheduler import Scheduler
from rollstock.interfaces.transport import Transport
from rollstock.manager import PluginManager, make_manager
from rollstock.metrics import Metric, Metrics, merge_metrics
from rollstock.micro import Loss, MicroBatch, Totals
from rollstock.placement import device_index
from rollstock.restart import ROUTER_STATE
from rollstock.roles.profiled import ProfiledWorker
from rollstock.seeding import derive_seed
from rollstock.weightsync.cargo import Cargo
from rollstock.weightsync.sender import Offer, WeightSender
from rollstock.weightsync.source import WeightSource

if TYPE_CHECKING:
    from rollstock.schema import RunConfig


class ModelWorker(ProfiledWorker):
    """Holds one model through a backend; scores batches with it and, where it is trainable, updates it."""

    def __init__(
        self,
        *,
        config: RunConfig,
        role: Literal["actor", "critic", "reference"],
        model: ModelSpec,
        total_updates: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        manager = make_manager(config.plugins.block)
        self.role = role
        self.rank = rank
        self.device = manager.create_as(Device, config.device)
        self.device.activate(device_index(self.device, rank))
        self.scheduler = manager.create_as(Scheduler, config.scheduler)
        self.algorithm = manager.create_as(Algorithm, config.algorithm)
        # Nobody sampled what an offline algorithm trains on, so no sampling temperature is its.
        self.temperature = 1.0 if self.algorithm.offline else config.sampling.temperature or 1.0
        self.backend = manager.create_as(Backend, config.engine_of(role))
        self.backend.use_workers(rank, world_size)
        compressor = manager.create_as(Compressor, config.compressor)
        if role != "reference" and world_size > 1 and not compressor.is_identity:
            compressor.setup(seed=derive_seed(config.train.seed, "compressor", role), rank=rank)
            self.backend.use_compressor(compressor)
        self.router = manager.create_as(Router, config.router) if config.router else None
        if self.router is not None:
            self.backend.use_router(self.router)
        self.backend.setup(model, self.device, trainable=role != "reference", total_updates=total_updates)
        self.data_parallel_rank = self.backend.data_parallel_rank(rank)
        sends = role == "actor" and rank == 0
        self.source = WeightSource(self.backend, _sender(config, manager) if sends else None, is_counted=rank == 0)

    @register(dispatch="data_parallel")
    def forward(self, batch: Batch, columns: Sequence[str]) -> dict[str, list[Tensor]]:
        """What the model says of each response, without gradients: for each column a tensor `[T]` a trajectory."""
        batch, cuts = self._own(batch), self._cuts(batch)
        found = self.backend.forward(batch, columns, temperature=self.temperature, micro_batches=cuts)
        lengths = batch.lengths.tolist()
        return {name: list(value.split(lengths)) for name, value in found.items()}

    @register(role=("actor", "critic"), dispatch="data_parallel")
    def update(self, batch: Batch, totals: Totals, algorithm_state: Mapping[str, Any]) -> Metrics:
        """One optimizer update with the algorithm's loss for this role; returns metrics named `actor/...` or
        `critic/...`."""
        self.algorithm.load_state(algorithm_state)
        critic = self.role == "critic"
        outputs = ["values"] if critic else sorted(self.algorithm.training_outputs())
        metrics = self.backend.update(
            self._own(batch),
            self._critic_loss if critic else self._actor_loss,
            outputs=outputs,
            temperature=self.temperature,
            micro_batches=self._cuts(batch),
            totals=totals,
        )
        named = {name if "/" in name else f"{self.role}/{name}": metric for name, metric in metrics.items()}
        # Actor and critic have experts each, whose loads do not add up.
        return {f"critic/{name}" if critic and name.startswith("moe/") else name: named[name] for name in named}

    @register(role="actor", dispatch="data_parallel")
    def measure(self, batch: Batch, totals: Totals, algorithm_state: Mapping[str, Any]) -> Metrics:
        """The algorithm's loss of a batch without an update: its metrics, and the loss itself as `loss`."""
        self.algorithm.load_state(algorithm_state)
        outputs = sorted(self.algorithm.training_outputs())
        found = self.backend.forward(batch, outputs, temperature=self.temperature, micro_batches=self._cuts(batch))
        with torch.no_grad():
            loss = self.algorithm.loss(
                MicroBatch(batch, totals, {name: batch.pad(value) for name, value in found.items()})
            )
        return {**loss.metrics, "loss": Metric(float(loss.value), 1.0, "sum")}

    @register()
    def weights(self, adapters: bool = False, base: bool = False) -> Cargo:
        """The weights that a generator needs; the tensors are the live ones where caller and worker share memory.

        adapters: the adapters alone, and with `base` the weights that they are added to.
        """
        return self.source.cargo(adapters=adapters, base=base)

    @register()
    def offer_weights(self, version: int, inboxes: Sequence[str], adapters: bool, base: bool) -> Offer | None:
        """Begin to send the same to generators, by the transport that the config names."""
        return self.source.offer(version, inboxes, adapters=adapters, base=base)

    @register(dispatch="rank_zero")
    def finish_offer(self) -> Metrics:
        """End that; the bytes that were sent, and how many chunks were sent again."""
        return self.source.finish()

    @register()
    def base_fingerprint(self) -> str:
        """The fingerprint of the weights that adapters are added to."""
        return self.source.base_fingerprint()

    @register()
    def fingerprint(self) -> str:
        """The fingerprint of `weights`."""
        return self.backend.fingerprint()

    @register()
    def state(self) -> BackendState:
        """The backend's state with the router's, for a checkpoint."""
        state = self.backend.state()
        if self.router is not None:
            state.values = {**state.values, ROUTER_STATE: self.router.state()}
        return state

    @register()
    def load_state(self, state: BackendState) -> None:
        """Take back the backend's state and the router's."""
        values = dict(state.values)
        kept = values.pop(ROUTER_STATE, None)
        self.backend.load_state(BackendState(state.tensors, values))
        if self.router is not None and kept is not None:
            self.router.load_state(kept)

    @register(dispatch="rank_zero")
    def router_state(self) -> dict[str, Any]:
        """What the generators' router must know to choose as this one does; empty without a router."""
        return {} if self.router is None else self.router.state()

    @register(dispatch="rank_zero")
    def save_config(self, path: Path) -> None:
        """Write the model's config files into a directory."""
        self.backend.save_config(path)

    @register()
    def memory(self) -> Metrics:
        """Memory held now, and at the peak, in GiB."""
        memory = self.device.memory()
        return {
            f"perf/{self.role}_memory_gib": Metric(memory.allocated / 2**30, 1.0, "max"),
            "perf/peak_memory_gib": Metric(memory.peak / 2**30, 1.0, "max"),
        }

    @register()
    def close(self) -> None:
        """Let go of the device, and of the transport."""
        self.source.close()
        self.backend.close()

    def _own(self, batch: Batch) -> Batch:
        """What this role may see: the experts that the policy chose are the actor's alone, since another model's route
        is another."""
        return batch if self.role == "actor" else batch.without("routed_experts")

    def _cuts(self, batch: Batch) -> list[list[int]]:
        if batch.whole_groups:
            return self._cuts_between_groups(batch)
        return micro_batches(self.scheduler, batch.total_lengths(), batch.groups.tolist())

    def _cuts_between_groups(self, batch: Batch) -> list[list[int]]:
        """What the scheduler makes of groups as if each were one long sequence."""
        lengths, members = batch.total_lengths(), batch.members()
        cuts = micro_batches(self.scheduler, [sum(lengths[i] for i in group) for group in members])
        return [[i for group in cut for i in members[group]] for cut in cuts]

    def _actor_loss(self, micro: MicroBatch) -> Loss:
        loss = self.algorithm.loss(micro)
        if self.algorithm.offline or "logprobs" not in HEAD_OUTPUTS[self.algorithm.actor_head()]:
            return loss
        return Loss(loss.value, merge_metrics([loss.metrics, _logprob_gap(micro)]))

    def _critic_loss(self, micro: MicroBatch) -> Loss:
        return self.algorithm.critic_loss(micro)


def _logprob_gap(micro: MicroBatch) -> Metrics:
    """How far the trainer's log-probs are from the sampler's: 0 to rounding on policy (invariant: ratio 1)."""
    gap = (micro.logprobs.detach() - micro.rollout_logprobs).abs()
    return {
        "training/rollout_logprob_diff_mean": micro.mean(gap),
        "training/rollout_logprob_diff_max": micro.max(gap),
    }


def _sender(config: RunConfig, manager: PluginManager) -> WeightSender | None:
    if config.transport is None:
        return None
    return WeightSender(manager.create_as(Transport, config.transport), config.weight_sync.chunk_mib << 20)
