"""The backend kind: what holds a model and trains it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rollstock.errors import UserError
from rollstock.plugin import C, Plugin

if TYPE_CHECKING:
    from torch import Tensor

    from rollstock.batch import Batch
    from rollstock.interfaces.compressor import Compressor
    from rollstock.interfaces.device import Device
    from rollstock.interfaces.model import ModelSpec
    from rollstock.interfaces.router import Router
    from rollstock.lowrank import LowRank
    from rollstock.metrics import Metrics
    from rollstock.micro import LossFunction, Totals
    from rollstock.schema import RunConfig


@dataclass
class BackendState:
    """All that a backend needs to go on as if never stopped: tensors in named parts, and the rest as JSON.

    The part `model` holds the weights under their Hugging Face names (a LoRA adapter and a value head under names of
    their own), the part `optimizer` the optimizer's tensors.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Backend(Plugin[C]):
    """Trains one model of one role. Batches come from and go back to the CPU; what happens between is the backend's."""

    trains_together: ClassVar[bool] = False
    """Whether the workers of a role add up their gradients, so that several of them train one model. Each of them is
    then given every call: methods without a batch may talk to the others, and rank 0's answer counts."""

    rank: int = 0
    world_size: int = 1

    def validate(self, config: RunConfig, role: str) -> Sequence[str]:
        """What this backend cannot do of what a run's config asks of a role's workers, one sentence each; asked before
        anything is started, of a backend that is not set up."""
        return ()

    def share_kept(self, world_size: int) -> float:
        """Of a model's weights, gradients and optimizer, the share that each of so many workers keeps, above 0 and at
        most 1: all of it, unless workers divide a model among them. Asked of a backend that is not set up, for an
        estimate of memory."""
        return 1.0

    def use_workers(self, rank: int, world_size: int) -> None:
        """Hear which of its role's workers this one is, and of how many; called once, before `setup`."""
        self.rank, self.world_size = rank, world_size

    @abstractmethod
    def setup(self, model: ModelSpec, device: Device[Any], *, trainable: bool, total_updates: int) -> None:
        """Build the model on the device; called once, before everything else.

        A model that is not `trainable` (a reference) gets no optimizer. `total_updates` is the number of calls of
        `update` that the run will make, for learning-rate schedules. Raises UserError for a model that cannot be had.
        """

    def data_parallel_rank(self, rank: int) -> int:
        """Which share of a batch the worker of this rank works on; asked once, after `setup`. Workers that hold parts
        of one replica (tensor or pipeline parallel) say the same number and get the same trajectories."""
        return rank

    def use_router(self, router: Router[Any]) -> None:
        """Let a router choose the experts; called once, before `setup`, in runs whose config names one.

        The backend tells it of its layers in `setup`, with the seed `derive_seed(model.seed, "router")`, adds its loss
        and metrics named `moe/...` in `update`, and tells it of the load after that. Raises UserError for a backend
        that cannot replace the choice of a model, as all are taken to be.
        """
        raise UserError(
            f"backend {self.plugin_name!r} cannot replace the choice of experts; leave `router` out of the config"
        )

    def use_compressor(self, compressor: Compressor[Any]) -> None:
        """Shrink the gradients that cross a network; called once, before `setup`, where several workers train a model
        and the config names a compressor that changes something.

        The backend keeps the compressor's state in its own. Raises UserError for a backend that cannot, as all are
        taken to be.
        """
        raise UserError(f"backend {self.plugin_name!r} cannot compress gradients; leave `compressor` out of the config")

    @abstractmethod
    def forward(
        self, batch: Batch, columns: Sequence[str], *, temperature: float, micro_batches: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """What the model says of the responses, without gradients: one flat `[N]` float32 tensor (CPU) for each of
        `columns`.

        columns: those of `HEAD_OUTPUTS[model.head]`: `logprobs` and `entropy` (nats, of the distribution at
        `temperature`), `values` (of the state before each token), `token_scores` (of all up to and including it).
        micro_batches: indices into the batch, each trajectory once; how they are cut changes nothing but memory.
        """

    @abstractmethod
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
        """One optimizer update on the sum of `loss` over the micro-batches; returns their metrics and the optimizer's.

        outputs: what each MicroBatch carries with a gradient, as in `forward`; all come from one pass through the
        model. The backend adds `grad_norm`, `lr` and `skipped_updates` (a gradient that is not finite changes nothing
        and counts 1).
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that a generator needs, full and merged, under their Hugging Face names, tied ones once; those of
        a value head are not among them."""

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`weights` without what adapters add, which training leaves as they are: for generators that are sent adapters
        alone. Raises UserError for a backend that has none, as all are taken to be."""
        raise UserError(f"backend {self.plugin_name!r} has no adapters: set weight_sync.content to full")

    def adapters(self) -> Iterator[tuple[str, LowRank]]:
        """What is added to some of `base_weights`, by their names: `LowRank.merge` of the two is what `weights` gives,
        to the bit. Raises UserError as `base_weights` does."""
        raise UserError(f"backend {self.plugin_name!r} has no adapters: set weight_sync.content to full")

    @abstractmethod
    def fingerprint(self) -> str:
        """`rollstock.weights.fingerprint` of `weights`."""

    @abstractmethod
    def state(self) -> BackendState:
        """A snapshot; the tensors may be the live ones, so write or copy them before the next `update`."""

    @abstractmethod
    def load_state(self, state: BackendState) -> None:
        """Take back what `state` gave, to the bit. Raises UserError naming the first tensor that does not fit."""

    @abstractmethod
    def save_config(self, path: Path) -> None:
        """Write the model's `config.json` (and generation config) for an export; weights are the checkpoint's.

        A model with the head `score` is written as sequence classification with one label.
        """

    def export_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn the part `model` of a state into plain Hugging Face weights: adapters merged, a value head dropped, a
        score head under the name that it has in sequence classification."""
        return dict(tensors)

    def close(self) -> None:
        """Let go of the device; called once, at the end."""
