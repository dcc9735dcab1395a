"""As many rollout workers as there is work for: they join and leave between the steps of a run.

For executors that can change the number of workers. Batches are cut as `dynamic_batch` cuts them, by the same options.
What a run learns does not depend on how many generate, so nothing of this is kept in a checkpoint: a resumed run begins
with the configured number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rollstock import Scheduler, WorkerLoad, hookimpl, option, suggest
from rollstock.plugins.schedulers.dynamic_batch import DynamicBatch, DynamicBatchConfig

if TYPE_CHECKING:
    from rollstock import Memory, RunConfig


@dataclass(kw_only=True)
class ElasticConfig(DynamicBatchConfig):
    """Options of the `elastic` scheduler, those of `dynamic_batch` among them."""

    roles: list[str] = option(["rollout"], "roles whose number of workers changes")
    least: float = option(0.1, "share of the configured number of workers that stays", minimum=0, maximum=1)
    most: float = option(2.0, "share of the configured number of workers that is never passed", minimum=1, maximum=1000)
    busy: float = option(
        0.7, "share of a step that workers spend working, above which others may join", minimum=0, maximum=1
    )
    idle: float = option(
        0.3, "share of a step that workers spend working, below which some leave", minimum=0, maximum=1
    )
    tasks_per_worker: int = option(
        8,
        "tasks that wait at once, for each worker, from which one more is worth its start",
        minimum=1,
        maximum=1_000_000,
    )
    patience: int = option(
        2,
        "steps in a row that must ask for the same, more workers or fewer, before it is done",
        minimum=1,
        maximum=10_000,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = [role for role in self.roles if role in ("actor", "critic", "reference")]
        if whole or not self.roles:
            raise ValueError(
                f"`roles` {self.roles} must name roles whose workers may join and leave, such as rollout: those that "
                "hold a model through a backend are as many as the config says"
            )
        if self.idle >= self.busy:
            raise ValueError(
                f"idle ({self.idle}) must be below busy ({self.busy}), or workers would leave and join for ever"
            )


class Elastic(Scheduler[ElasticConfig]):
    """Aims at a utilisation halfway between `idle` and `busy`."""

    resizes: ClassVar[bool] = True

    def __init__(self, config: ElasticConfig | None = None) -> None:
        super().__init__(config)
        self._batches = DynamicBatch(self.config)
        self._asked: dict[str, int] = {}

    def validate(self, config: RunConfig, resizable: Sequence[str]) -> list[str]:
        """Refuse roles whose workers nobody can make more or fewer, since they would be left as they are in silence."""
        return [
            f"scheduler.roles: {role!r} is no role of this run whose number of workers can change, which takes workers "
            "without a state in processes of their own (no `devices`, nobody colocated). "
            f"{suggest(role, resizable)}"
            for role in self.config.roles
            if role not in resizable
        ]

    def micro_batches(
        self, lengths: Sequence[int], *, groups: Sequence[int] | None = None, num_parts: int = 1
    ) -> list[list[int]]:
        """As `dynamic_batch`."""
        return self._batches.micro_batches(lengths, groups=groups, num_parts=num_parts)

    def generation_batch_size(
        self, prompt_lengths: Sequence[int], max_new_tokens: int, *, bytes_per_token: int, memory: Memory
    ) -> int:
        """As `dynamic_batch`."""
        return self._batches.generation_batch_size(
            prompt_lengths, max_new_tokens, bytes_per_token=bytes_per_token, memory=memory
        )

    def num_workers(self, load: WorkerLoad) -> int | None:
        """More where workers are busy and tasks wait, at most twice as many at a time; fewer where they are idle.

        None as long as the load is in between, is of another role, or has not asked for the same `patience` times.
        """
        if load.role not in self.config.roles:
            return None
        wanted = self._wanted(load)
        direction = (wanted > load.num_workers) - (wanted < load.num_workers)
        before = self._asked.get(load.role, 0)
        asked = before + direction if before * direction >= 0 else direction
        self._asked[load.role] = asked if direction else 0
        if abs(self._asked[load.role]) < self.config.patience:
            return None
        self._asked[load.role] = 0
        return wanted

    def _wanted(self, load: WorkerLoad) -> int:
        config, now = self.config, load.num_workers
        configured = load.num_configured or now
        least = max(1, math.ceil(config.least * configured - 1e-9))
        most = max(least, math.floor(config.most * configured + 1e-9))
        aim = (config.idle + config.busy) / 2
        wanted = now
        if load.utilisation > config.busy and load.queue_length > now * config.tasks_per_worker:
            by_queue = math.ceil(load.queue_length / config.tasks_per_worker)
            wanted = min(by_queue, 2 * now, max(now + 1, math.ceil(now * load.utilisation / aim)))
        elif load.utilisation < config.idle:
            wanted = math.ceil(now * load.utilisation / aim)
        return min(most, max(least, wanted))


@hookimpl
def rollstock_scheduler() -> type[Scheduler[Any]]:
    """The class of this plugin."""
    return Elastic
