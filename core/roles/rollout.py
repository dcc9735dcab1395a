"""The role that generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rollstock.dispatch import register
from rollstock.interfaces.device import Device
from rollstock.interfaces.model import ModelSpec
from rollstock.interfaces.rollout import GenerationRequest, GenerationResult, Rollout, Sampling
from rollstock.interfaces.router import Router
from rollstock.interfaces.scheduler import Scheduler
from rollstock.manager import make_manager
from rollstock.placement import device_index
from rollstock.roles.profiled import ProfiledWorker
from rollstock.tokens import load_tokenizer

if TYPE_CHECKING:
    from rollstock.schema import RunConfig


class RolloutWorker(ProfiledWorker):
    """Holds one generation engine."""

    def __init__(self, *, config: RunConfig, model: ModelSpec, rank: int = 0, world_size: int = 1) -> None:
        manager = make_manager(config.plugins.block)
        self.rank = rank
        self.device = manager.create_as(Device, config.device)
        self.device.activate(device_index(self.device, rank))
        self.engine = manager.create_as(Rollout, {**config.rollout, **config.role("rollout").backend})
        self.router = manager.create_as(Router, config.router) if config.router else None
        if self.router is not None:
            self.engine.use_router(self.router)
        self.engine.use_scheduler(manager.create_as(Scheduler, config.scheduler))
        self.engine.setup(model, self.device, load_tokenizer(config.model))

    @register(dispatch="scatter")
    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> GenerationResult:
        """Sample every request to its end."""
        if not requests:
            return GenerationResult([])
        return self.engine.generate(requests, sampling)

    @register()
    def load_weights(self, weights: Sequence[tuple[str, Tensor]], version: int, alias: bool) -> None:
        """Take the trainer's weights; see `Rollout.load_weights`."""
        self.engine.load_weights(weights, version, alias=alias)

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
        """Let go of the device."""
        self.engine.close()
