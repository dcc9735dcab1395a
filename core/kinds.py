"""The kinds of plugin: one table, from which entry-point groups, provider hooks, interfaces and config sections
follow.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from rollstock.errors import PluginError, suggest


@dataclass(frozen=True)
class Kind:
    """One kind of plugin.

    name: as in `kind:name`; interface: the class that its plugins derive from; role: what it does in the loop;
    section: the key of the config that chooses it, empty if none does yet; many: whether that key holds a list;
    optional: whether it may be left out, and is none then; core_options: keys of its section that are the core's, not
    the plugin's.
    """

    name: str
    interface: str
    role: str
    section: str
    many: bool = False
    optional: bool = False
    core_options: tuple[str, ...] = ("name",)

    @property
    def group(self) -> str:
        """The entry-point group, `rollstock.algorithm`."""
        return f"rollstock.{self.name}"

    @property
    def provider(self) -> str:
        """The provider hook, `rollstock_algorithm`."""
        return f"rollstock_{self.name}"

    def interface_class(self) -> type[Any]:
        """The class that plugins of this kind derive from."""
        found: type[Any] = getattr(importlib.import_module(f"rollstock.interfaces.{self.name}"), self.interface)
        return found


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("algorithm", "Algorithm", "turns rewards into advantages, and log-probs into a loss", "algorithm"),
        Kind("backend", "Backend", "holds a model and trains it", "backend"),
        Kind("router", "Router", "chooses experts of a mixture-of-experts layer", "router", optional=True),
        Kind("compressor", "Compressor", "shrinks what crosses a network", "compressor"),
        Kind("device", "Device", "is the chip: memory, streams, seeds, collectives", "device"),
        Kind("scheduler", "Scheduler", "decides sizes and places: batches, experts, workers", "scheduler"),
        Kind("rollout", "Rollout", "generates with the current weights", "rollout"),
        Kind("environment", "Environment", "hands out tasks, plays the other side, scores", "environment"),
        Kind("reward", "Reward", "scores trajectories", "rewards", many=True, core_options=("name", "weight")),
        Kind("executor", "Executor", "starts workers and calls them", "executor"),
        Kind("transport", "Transport", "moves bytes between processes", "transport", optional=True),
        Kind("tracker", "Tracker", "records metrics and samples", "trackers", many=True),
        Kind("extension", "Extension", "listens to or wraps the stages of a step", "extensions", many=True),
    )
}


def get_kind(name: str) -> Kind:
    """The kind called `name`. Raises PluginError, with the nearest one, if there is none."""
    try:
        return KINDS[name]
    except KeyError:
        raise PluginError(f"there is no plugin kind {name!r}. {suggest(name, KINDS)}") from None
