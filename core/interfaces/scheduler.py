"""The scheduler kind: what decides sizes and places, of batches, experts and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rollstock.plugin import C, Plugin

if TYPE_CHECKING:
    from rollstock.interfaces.device import Memory
    from rollstock.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class WorkerLoad:
    """How busy a role was since this was last measured: its workers, the most tasks that waited at once, and the share
    of time that workers spent working (0 to 1). num_configured: the workers that the config gives the role; 0: unknown.
    """

    role: str
    num_workers: int
    queue_length: int
    utilisation: float
    num_configured: int = 0


class Scheduler(Plugin[C]):
    """Each method is one decision; a scheduler overrides those that it makes, and None leaves things as they are."""

    resizes: ClassVar[bool] = False
    """Whether it changes the number of workers of roles; a run that it could not do that in is refused."""

    def validate(self, config: RunConfig, resizable: Sequence[str]) -> Sequence[str]:
        """What in the resolved run config makes this scheduler do nothing or harm; each sentence refuses the run.

        resizable: the roles of this run whose number of workers can change, those of extensions among them. Called
        before anything starts, and by `rollstock doctor`. Return nothing when all is well.
        """
        return ()

    def micro_batches(
        self, lengths: Sequence[int], *, groups: Sequence[int] | None = None, num_parts: int = 1
    ) -> list[list[int]] | None:
        """Cut sequences of `lengths` tokens into micro-batches: lists of indices, each index once.

        groups: sequences of one group share a prompt, and are cheaper together; num_parts: ranks that must each get the
        same number of micro-batches (a multiple of it is returned, rank r takes the lists r, r + num_parts, ...).
        """
        return None

    def generation_batch_size(
        self, prompt_lengths: Sequence[int], max_new_tokens: int, *, bytes_per_token: int, memory: Memory
    ) -> int | None:
        """How many sequences to generate at once, when each token of context keeps `bytes_per_token` of cache."""
        return None

    def num_workers(self, load: WorkerLoad) -> int | None:
        """How many workers a role should have from the next step on, at least 1; asked in the controller after each
        step, of the roles whose number can change."""
        return None

    def place_experts(self, load: Sequence[Sequence[float]], num_places: int) -> list[list[int]] | None:
        """Where each layer's experts should live: for `load[layer][expert]` tokens, a place for every expert."""
        return None

    def state(self) -> dict[str, Any]:
        """What must survive a restart, as JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
