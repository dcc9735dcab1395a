"""A config completed with every option of the plugins that it names, each checked by the plugin's own dataclass.

For the start of a run, whose `config.yaml` must not change its meaning when a plugin's default does.
"""

from __future__ import annotations

import copy
import dataclasses

from rollstock.errors import ConfigError
from rollstock.kinds import KINDS
from rollstock.manager import PluginManager
from rollstock.schema import CORE_ROLES, RunConfig
from rollstock.section import Section


def complete_config(config: RunConfig, manager: PluginManager) -> RunConfig:
    """A copy of `config` in which every plugin section has all its options. Imports the plugins.

    Raises PluginError and OptionError, with file and line, for a plugin that cannot be used and an option that does not
    fit.
    """
    changes: dict[str, Section | list[Section]] = {}
    for kind in KINDS.values():
        if kind.section:
            found = getattr(config, kind.section)
            if found is None:
                continue
            completed = [manager.complete(kind.name, section) for section in (found if kind.many else [found])]
            changes[kind.section] = completed if kind.many else completed[0]
    whole = dataclasses.replace(config, **changes)  # type: ignore[arg-type]  # the types follow from the kinds
    whole.origins = copy.copy(config.origins)
    _check_roles(whole, manager)
    return whole


def _check_roles(config: RunConfig, manager: PluginManager) -> None:
    """Check the options that a role has of its own against the plugin that will get them."""
    for role in config.roles:
        if not config.role(role).backend:
            continue
        place = f"roles.{role}.backend"
        if role == "reward":
            raise ConfigError(f"{place}: the reward role has no backend; its processes are set in reward_limits")
        if role not in CORE_ROLES:
            raise ConfigError(f"{place}: only {', '.join(CORE_ROLES)} have a backend or an engine of the core's")
        manager.complete("rollout" if role == "rollout" else "backend", config.engine_of(role))
