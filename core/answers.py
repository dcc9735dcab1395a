"""What plugins answer, where a wrong answer would change a run without a word or fail far from its cause.

For the builder of a run and its workers. What a plugin's class must look like is checked by `rollstock.contract`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollstock.errors import PluginError
from rollstock.interfaces.backend import Backend
from rollstock.interfaces.executor import Executor, WorkerGroup, WorkerSpec
from rollstock.interfaces.scheduler import Scheduler, WorkerLoad
from rollstock.plugin import Plugin

if TYPE_CHECKING:
    from rollstock.interfaces.device import Memory


def sentences(kind: str, plugin: Plugin[Any], found: object) -> list[str]:
    """The problems that a plugin's `validate` has found. Raises PluginError unless they are a list of texts."""
    if isinstance(found, (list, tuple)) and all(isinstance(problem, str) for problem in found):
        return list(found)
    name = f"{kind}:{plugin.plugin_name}"
    raise PluginError(
        f"validate of plugin {name} must return a list of sentences, empty if all is well, not {found!r}", name
    )


def micro_batches(
    scheduler: Scheduler[Any], lengths: Sequence[int], groups: Sequence[int] | None = None
) -> list[list[int]]:
    """How the scheduler cuts sequences; all at once if it leaves that to others.

    Raises PluginError unless each index is in one cut: a sequence that is left out, or there twice, would be trained on
    that often.
    """
    cuts: Any = scheduler.micro_batches(lengths, groups=groups)
    everything = list(range(len(lengths)))
    if cuts is None:
        return [everything]
    try:
        found = [[int(index) for index in cut] for cut in cuts]
    except (TypeError, ValueError):
        found = []
    if sorted(index for cut in found for index in cut) != everything:
        name = f"scheduler:{scheduler.plugin_name}"
        raise PluginError(
            f"micro_batches of plugin {name} must return lists that hold each index from 0 to {len(lengths) - 1} once, "
            f"not {str(cuts)[:200]}",
            name,
        )
    return found


def num_workers(scheduler: Scheduler[Any], load: WorkerLoad) -> int | None:
    """How many workers the scheduler wants. Raises PluginError unless that is a whole number from 1 on, or None."""
    return _size(scheduler, "num_workers", scheduler.num_workers(load))


class CheckedScheduler(Scheduler[Any]):
    """A scheduler as an engine is given it: its decisions, and an error of its own where one cannot be followed."""

    def __init__(self, scheduler: Scheduler[Any]) -> None:
        self.plugin_name = scheduler.plugin_name
        super().__init__(scheduler.config)
        self._scheduler = scheduler

    def micro_batches(
        self, lengths: Sequence[int], *, groups: Sequence[int] | None = None, num_parts: int = 1
    ) -> list[list[int]] | None:
        """The scheduler's own."""
        return self._scheduler.micro_batches(lengths, groups=groups, num_parts=num_parts)

    def num_workers(self, load: WorkerLoad) -> int | None:
        """See `num_workers` of this module."""
        return num_workers(self._scheduler, load)

    def place_experts(self, load: Sequence[Sequence[float]], num_places: int) -> list[list[int]] | None:
        """The scheduler's own."""
        return self._scheduler.place_experts(load, num_places)

    def generation_batch_size(
        self, prompt_lengths: Sequence[int], max_new_tokens: int, *, bytes_per_token: int, memory: Memory
    ) -> int | None:
        """The scheduler's own. Raises PluginError unless that is a whole number from 1 on, or None."""
        found = self._scheduler.generation_batch_size(
            prompt_lengths, max_new_tokens, bytes_per_token=bytes_per_token, memory=memory
        )
        return _size(self._scheduler, "generation_batch_size", found)


def _size(scheduler: Scheduler[Any], method: str, found: Any) -> int | None:
    if found is None:
        return None
    try:
        size = 0 if isinstance(found, bool) else operator.index(found)
    except TypeError:
        size = 0
    if size < 1:
        name = f"scheduler:{scheduler.plugin_name}"
        raise PluginError(
            f"{method} of plugin {name} must return a whole number, at least 1, or None to leave it to others, not "
            f"{found!r:.200} of type {type(found).__name__}",
            name,
        )
    return size


def share_kept(backend: Backend[Any], world_size: int) -> float:
    """The share of a model that each of a role's workers keeps. Raises PluginError unless it is above 0 and at most
    1."""
    found: Any = backend.share_kept(world_size)
    if not isinstance(found, (int, float)) or isinstance(found, bool) or not 0 < found <= 1:
        name = f"backend:{backend.plugin_name}"
        raise PluginError(
            f"share_kept of plugin {name} must return a number above 0 and at most 1, not {found!r:.200}", name
        )
    return float(found)


def worker_group(executor: Executor[Any], spec: WorkerSpec) -> WorkerGroup:
    """The workers of a role, started. Raises PluginError unless the executor gives a finished group of so many; and
    whatever a factory raised."""
    name = f"executor:{executor.plugin_name}"
    found: Any = executor.start(spec)
    if not isinstance(found, WorkerGroup):
        raise PluginError(f"start of plugin {name} must return a WorkerGroup, not {found!r:.200}", name)
    kind = type(found)
    lacking = [method for method in _GROUP if getattr(kind, method) is getattr(WorkerGroup, method)]
    if lacking:
        raise PluginError(
            f"start of plugin {name} must return a finished WorkerGroup, and {kind.__name__} lacks "
            f"{', '.join(lacking)}: define what rollstock.WorkerGroup leaves open ({', '.join(_GROUP)})",
            name,
        )
    if found.size != spec.count:
        raise PluginError(
            f"start of plugin {name} must return the {spec.count} workers of {spec.role!r}, and size of "
            f"{kind.__name__} is {found.size!r}",
            name,
        )
    return found


_GROUP = ("size", "call", "submit")
"""What a group of workers must define; the rest of the interface has an answer of its own."""
