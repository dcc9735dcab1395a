"""A process of the cluster: one Ray actor, what it was started with, and whether it is still there.

For the `ray` executor. It may be started again, in the same place, and then has another actor and another id.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollstock.plugins.executors._host import Host, Surroundings


@dataclass(eq=False)
class Process:
    """options: of its actor, its place among them. pid, address, node: where it is, once it has said so; log: the file
    that it writes, once there is one. generation: how often it was started; is_lost: nobody answers there any more, or
    nobody may be asked yet."""

    label: str
    options: Mapping[str, Any]
    surroundings: Surroundings
    actor: Any = None
    pid: int = 0
    address: str = ""
    node: str = ""
    log: str = ""
    generation: int = 0
    is_lost: bool = False

    def start(self, ray: Any) -> None:
        """Start it, or start it again; returns at once."""
        self.actor = ray.remote(Host).options(**self.options).remote(self.label, self.surroundings)
        self.pid, self.generation = 0, self.generation + 1

    def end(self, ray: Any) -> None:
        """End it, if it is there."""
        with contextlib.suppress(Exception):  # Ray says in several ways that there is nobody
            ray.kill(self.actor)

    def end_hung(self, ray: Any) -> None:
        """End it even if it listens to nobody."""
        self.end(ray)
        if not self.pid:
            return
        if self.address == ray.util.get_node_ip_address():
            _kill(self.pid)
            return
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        there = strategies.NodeAffinitySchedulingStrategy(self.node, soft=False)
        ray.remote(num_cpus=0)(_kill).options(scheduling_strategy=there).remote(self.pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
