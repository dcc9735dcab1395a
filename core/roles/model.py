"""The roles that hold a model: actor, critic and reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from rollstock.batch import Batch
from rollstock.dispatch import register
from rollstock.interfaces.algorithm import Algorithm
from rollstock.interfaces.backend import Backend, BackendState
from rollstock.interfaces.device import Device
from rollstock.interfaces.model import ModelSpec
from rollstock.interfaces.scheduler import Scheduler
from rollstock.manager import make_manager
from rollstock.metrics import Metric, Metrics, merge_metrics
from rollstock.micro import Loss, MicroBatch, Totals

if TYPE_CHECKING:
    from rollstock.schema import RunConfig


class ModelWorker:
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
        self.temperature = config.sampling.temperature or 1.0
        self.device = manager.create_as(Device, config.device)
        self.device.activate(rank if world_size > 1 else 0)
        self.scheduler = manager.create_as(Scheduler, config.scheduler)
        self.algorithm = manager.create_as(Algorithm, config.algorithm)
        self.backend = manager.create_as(Backend, {**config.backend, **config.role(role).backend})
        self.backend.setup(model, self.device, trainable=role != "reference", total_updates=total_updates)

    @register(dispatch="scatter")
    def forward(self, batch: Batch, columns: Sequence[str]) -> dict[str, list[Tensor]]:
        """What the model says of each response, without gradients: for each column a tensor `[T]` a trajectory."""
        cuts = self._cuts(batch)
        found = self.backend.forward(batch, columns, temperature=self.temperature, micro_batches=cuts)
        lengths = batch.lengths.tolist()
        return {name: list(value.split(lengths)) for name, value in found.items()}

    @register(dispatch="scatter")
    def update(self, batch: Batch, totals: Totals, algorithm_state: Mapping[str, Any]) -> Metrics:
        """One optimizer update with the algorithm's loss for this role; returns metrics named `actor/...` or
        `critic/...`."""
        self.algorithm.load_state(algorithm_state)
        critic = self.role == "critic"
        outputs = ["values"] if critic else sorted(self.algorithm.training_outputs())
        metrics = self.backend.update(
            batch,
            self._critic_loss if critic else self._actor_loss,
            outputs=outputs,
            temperature=self.temperature,
            micro_batches=self._cuts(batch),
            totals=totals,
        )
        return {name if "/" in name else f"{self.role}/{name}": metric for name, metric in metrics.items()}

    @register(dispatch="rank_zero")
    def weights(self) -> list[tuple[str, Tensor]]:
        """The weights that a generator needs; the tensors are the live ones where caller and worker share memory."""
        return list(self.backend.weights())

    @register()
    def fingerprint(self) -> str:
        """The fingerprint of `weights`."""
        return self.backend.fingerprint()

    @register()
    def state(self) -> BackendState:
        """The backend's state, for a checkpoint."""
        return self.backend.state()

    @register()
    def load_state(self, state: BackendState) -> None:
        """Take back the backend's state."""
        self.backend.load_state(state)

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
        """Let go of the device."""
        self.backend.close()

    def _cuts(self, batch: Batch) -> list[list[int]]:
        cuts = self.scheduler.micro_batches(batch.total_lengths(), groups=batch.groups.tolist())
        return cuts if cuts is not None else [list(range(len(batch)))]

    def _actor_loss(self, micro: MicroBatch) -> Loss:
        loss = self.algorithm.loss(micro)
        ratio_gap = _logprob_gap(micro)
        return Loss(loss.value, merge_metrics([loss.metrics, ratio_gap]))

    def _critic_loss(self, micro: MicroBatch) -> Loss:
        return self.algorithm.critic_loss(micro)


def _logprob_gap(micro: MicroBatch) -> Metrics:
    """How far the trainer's log-probs are from the sampler's: 0 to rounding on policy (invariant: ratio 1)."""
    gap = (micro.logprobs.detach() - micro.rollout_logprobs).abs()
    return {
        "training/rollout_logprob_diff_mean": micro.mean(gap),
        "training/rollout_logprob_diff_max": micro.max(gap),
    }
