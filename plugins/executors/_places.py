"""Room in a Ray cluster: what a worker needs, and the placement groups that hold it.

For the `ray` executor. A role has a placement group with a bundle for each worker, so that it gets all of them or none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from threading import Event
from typing import TYPE_CHECKING, Any

from rollstock import RunError, WorkerSpec
from rollstock.plugins.executors._cluster import Cluster

if TYPE_CHECKING:
    from rollstock.plugins.executors.ray import RayConfig

logger = logging.getLogger(__name__)

# What Ray calls the chips that a variable shows to a process.
_RESOURCES = {"CUDA_VISIBLE_DEVICES": "GPU", "ASCEND_RT_VISIBLE_DEVICES": "NPU"}
_LEAST = 0.001  # of a core: a bundle must hold something
_PATIENCE_S = 10.0  # after which a wait for room is logged
_REMEDY = (
    "Give the roles of the config fewer cpus, let one share processes with another (colocate_with), or add machines"
)


class Places:
    """The placement groups of a run."""

    def __init__(self, cluster: Cluster, config: RayConfig, ended: Event) -> None:
        """`ended` is set when nobody waits for room any more."""
        self._cluster = cluster
        self._config = config
        self._ended = ended
        self._groups: list[Any] = []
        self._held: dict[str, dict[str, float]] = {}  # by placement group

    def reserve(self, spec: WorkerSpec, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Wait for the room that the workers of a role need, for `start_timeout_s` unless `timeout_s` is given; returns
        the options of each one's actor.

        Raises RunError if the whole cluster is too small, or nothing became free in time.
        """
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = self._needed(spec)
        self._check_size(spec, resources)
        group = placement_group([resources] * spec.count, strategy=self._config.placement.upper())
        self._groups.append(group)
        self._held[group.id.hex()] = {name: amount * spec.count for name, amount in resources.items()}
        try:
            self._await(spec, resources, group, self._config.start_timeout_s if timeout_s is None else timeout_s)
        except RunError:
            self._remove(group)  # it would take the room once there is some
            raise
        others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
        return [
            {
                "num_cpus": resources["CPU"],
                "num_gpus": resources.get("GPU", 0),
                "resources": others,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            }
            for rank in range(spec.count)
        ]

    def give_back(self, options: Mapping[str, Any]) -> bool:
        """Give back the room of one worker, if nobody else's is held together with it; False if it is kept."""
        group = options["scheduling_strategy"].placement_group
        if group.bundle_count > 1:
            return False
        self._remove(group)
        return True

    def release(self) -> None:
        """Give everything back."""
        while self._groups:
            self._remove(self._groups[-1])

    def _remove(self, group: Any) -> None:
        from ray.util.placement_group import remove_placement_group

        self._groups.remove(group)
        del self._held[group.id.hex()]
        remove_placement_group(group)

    def _needed(self, spec: WorkerSpec) -> dict[str, float]:
        """What Ray sets aside for a worker. Devices that the config names are not Ray's to choose."""
        resources = {"CPU": _LEAST if self._cluster.is_private else max(spec.cpus, _LEAST)}
        if spec.visibility_variable is not None and not spec.devices:
            resources[_RESOURCES.get(spec.visibility_variable, spec.visibility_variable)] = 1.0
        return resources

    def _check_size(self, spec: WorkerSpec, resources: Mapping[str, float]) -> None:
        total = self._cluster.ray.cluster_resources()
        for name, amount in resources.items():
            held = sum(each.get(name, 0.0) for each in self._held.values())
            if held + amount * spec.count > total.get(name, 0) + 1e-6:
                others = f" beside the {held:g} of the run's other roles" if held > _LEAST * len(self._held) else ""
                raise RunError(
                    f"the {spec.count} workers of {spec.role} ask for {amount * spec.count:g} {name}{others}, and the "
                    f"whole Ray cluster has {total.get(name, 0):g}: see roles.{spec.role} in the config, and "
                    f"`ray status`. {_REMEDY}"
                )

    def _await(self, spec: WorkerSpec, resources: Mapping[str, float], group: Any, timeout_s: float) -> None:
        began = time.monotonic()
        told = False
        while not (self._ended.is_set() or group.wait(timeout_seconds=1)):
            waited = time.monotonic() - began
            free = self._cluster.ray.available_resources()
            what = f"{spec.count} workers of {spec.role} with {_amounts(resources)} each"
            there = _amounts({name: free.get(name, 0.0) for name in resources})
            if waited > timeout_s:
                raise RunError(
                    f"no room in the Ray cluster for {what}, after {waited:.0f} s; free are {there}. {_REMEDY}"
                )
            if waited > _PATIENCE_S and not told:
                told = True
                logger.warning("waiting for room in the Ray cluster for %s; free are %s", what, there)


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
