"""Where the roles of a run go: those of the core and of its extensions, each with what the config says of it.

For the builder of a run. What a role does is in `rollstock.roles`, or the extension's; where its processes are is the
executor's to decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollstock.dispatch import registration
from rollstock.errors import ConfigError, PluginError, RunError
from rollstock.interfaces.device import Device
from rollstock.interfaces.executor import Retry, WorkerSpec
from rollstock.interfaces.extension import Extension
from rollstock.schema import CORE_ROLES

if TYPE_CHECKING:
    from rollstock.schema import RunConfig


def brought_roles(config: RunConfig, extensions: Sequence[Extension[Any]]) -> dict[str, WorkerSpec]:
    """The roles that extensions bring, by name.

    Raises PluginError for a role that somebody has already, or whose workers cannot be ended; ConfigError for one in
    the config that nobody brings.
    """
    owners: dict[str, str] = dict.fromkeys(CORE_ROLES, "the core")
    found: dict[str, WorkerSpec] = {}
    for extension in extensions:
        for spec in extension.roles(config):
            plugin = f"extension:{extension.plugin_name}"
            if spec.role in owners:
                raise PluginError(
                    f"{plugin} brings the role {spec.role!r}, which {owners[spec.role]} has already; it needs another "
                    "name",
                    plugin,
                )
            if isinstance(spec.factory, type):
                try:
                    registration(spec.factory, "close", spec.role)
                except RunError as error:
                    raise PluginError(
                        f"{plugin} brings the role {spec.role!r}, which cannot be ended: {error}"
                    ) from None
            owners[spec.role], found[spec.role] = plugin, spec
    config.check_roles(found)
    return found


def placed(config: RunConfig, spec: WorkerSpec) -> WorkerSpec:
    """The workers of a role, with what the config's sections `roles` and `recovery` say of them."""
    again = config.recovery
    retry = Retry(limit=again.max_retries, first_s=again.backoff_s, longest_s=again.max_backoff_s)
    spec = dataclasses.replace(spec, retry=retry)
    if spec.role not in config.roles:
        return spec
    said = config.role(spec.role)
    return dataclasses.replace(
        spec,
        count=said.count,
        devices=tuple(said.devices),
        cpus=said.cpus,
        colocate_with=said.colocate_with,
        call_timeout_s=said.call_timeout_s,
    )


def start_order(config: RunConfig, roles: Sequence[str], brought: Mapping[str, WorkerSpec]) -> list[str]:
    """The core's roles and those that were brought, each behind the one whose processes it shares. Raises ConfigError
    for a role that shares those of nobody, or of one with fewer workers."""
    settled = {role: config.role(role) for role in roles} | {role: placed(config, brought[role]) for role in brought}
    hosts = {role: said.colocate_with for role, said in settled.items()}
    ordered: list[str] = []
    waiting = list(hosts)
    while waiting:
        ready = [role for role in waiting if hosts[role] in (None, *ordered)]
        if not ready:
            role, host = waiting[0], hosts[waiting[0]]
            all_roles = ", ".join(hosts)
            reason = "which waits for it in turn" if host in waiting else f"which is none of this run's ({all_roles})"
            raise ConfigError(f"roles.{role}.colocate_with: {host!r}, {reason}; name another role, or none")
        role, host = ready[0], hosts[ready[0]]
        if host is not None and settled[role].count > settled[host].count:
            raise ConfigError(
                f"roles.{role}.count: {settled[role].count} workers cannot share the processes of {host!r}, of which "
                f"there are {settled[host].count}"
            )
        ordered.append(role)
        waiting.remove(role)
    return ordered


def misplaced(config: RunConfig) -> Iterator[str]:
    """What the section `roles` says and nobody could do, one sentence each."""
    for name, said in config.roles.items():
        if said.devices and len(said.devices) != said.count:
            yield (
                f"roles.{name}.devices: {said.devices} must name one device for each of its workers, and "
                f"roles.{name}.count is {said.count}"
            )
        if said.colocate_with is not None and said.devices:
            host = said.colocate_with
            yield f"roles.{name}.devices: {said.devices} cannot be chosen; its workers use those of {host!r}"


def device_index(device: Device[Any], rank: int) -> int:
    """The device of a worker, of those that its process sees: the only one, or, where it sees several, its own."""
    return rank % max(1, device.count())
