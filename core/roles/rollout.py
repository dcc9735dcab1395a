"""The role that generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollstock.answers import CheckedScheduler
from rollstock.dispatch import register
from rollstock.interfaces.device import Device
from rollstock.interfaces.model import ModelSpec
from rollstock.interfaces.rollout import GenerationRequest, GenerationResult, Rollout, Sampling
from rollstock.interfaces.router import Router
from rollstock.interfaces.scheduler import Scheduler
from rollstock.interfaces.transport import Transport
from rollstock.manager import PluginManager, make_manager
from rollstock.metrics import Metrics
from rollstock.placement import device_index
from rollstock.roles.profiled import ProfiledWorker
from rollstock.tokens import load_tokenizer
from rollstock.weightsync.cargo import Cargo
from rollstock.weightsync.intake import WeightIntake
from rollstock.weightsync.receiver import WeightReceiver
from rollstock.weightsync.sender import Offer

if TYPE_CHECKING:
    from rollstock.schema import RunConfig


class RolloutWorker(ProfiledWorker):
    """Holds one generation engine."""

    def __init__(self, *, config: RunConfig, model: ModelSpec, rank: int = 0, world_size: int = 1) -> None:
        manager = make_manager(config.plugins.block)
        self.rank = rank
        self.device = manager.create_as(Device, config.device)
        self.device.activate(device_index(self.device, rank))
        self.engine = manager.create_as(Rollout, config.engine_of("rollout"))
        self.router = manager.create_as(Router, config.router) if config.router else None
        if self.router is not None:
            self.engine.use_router(self.router)
        self.engine.use_scheduler(CheckedScheduler(manager.create_as(Scheduler, config.scheduler)))
        self.engine.setup(model, self.device, load_tokenizer(config.model))
        self.intake = WeightIntake(self.engine, _receiver(config, manager, rank))

    @register(dispatch="scatter")
    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> GenerationResult:
        """Sample every request to its end."""
        if not requests:
            return GenerationResult([])
        return self.engine.generate(requests, sampling)

    @register()
    def load_weights(self, cargo: Cargo, version: int, alias: bool) -> Metrics:
        """Take the trainer's weights from the executor; `alias`: see `Rollout.load_weights`."""
        return self.intake.take(cargo, version, alias=alias)

    @register(dispatch="all_gather")
    def weights_inbox(self) -> str:
        """Where this worker can be sent weights to, by the transport that the config names."""
        return self.intake.address

    @register()
    def take_weights(self, offer: Offer) -> Metrics:
        """Take the weights that a trainer sends, by that transport."""
        return self.intake.take_offer(offer)

    @register(dispatch="all_gather")
    def base_fingerprint(self) -> str:
        """The fingerprint of the weights that adapters are added to, empty where there are none; of every worker."""
        return self.intake.base_fingerprint

    @register()
    def load_router(self, state: Mapping[str, Any]) -> None:
        """Take the state of the trainer's router."""
        if self.router is not None:
            self.router.load_state(state)

    @register(dispatch="rank_zero")
    def context_length(self) -> int | None:
        """See `Rollout.context_length`."""
        return self.engine.context_length

    @register(dispatch="all_gather")
    def fingerprint(self) -> str:
        """The fingerprint of the weights in use; the controller gets that of every worker."""
        return self.engine.fingerprint()

    @register()
    def close(self) -> None:
        """Let go of the device, and of the transport."""
        self.intake.close()
        self.engine.close()


def _receiver(config: RunConfig, manager: PluginManager, rank: int) -> WeightReceiver | None:
    if config.transport is None:
        return None
    limits = config.weight_sync
    transport = manager.create_as(Transport, config.transport)
    return WeightReceiver(transport, rank, max_resends=limits.max_resends, timeout_s=limits.timeout_s)
