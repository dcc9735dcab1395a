"""Plugins that must not be used, whatever asks for them: `plugins.block` in a config, and an environment variable.

For people who have to keep a run away from an installed plugin, such as a tracker that sends data out. Blocked plugins
are never imported; a config that names one is refused with who blocked it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Final

from rollstock.errors import PluginError
from rollstock.kinds import get_kind

VARIABLE: Final = "ROLLSTOCK_BLOCK_PLUGINS"
"""Environment variable: names or `kind:name`, separated by commas."""


def block_rules(configured: Iterable[str] = ()) -> dict[str, str]:
    """What is blocked, `name` or `kind:name`, each with who says so. Raises PluginError for a kind that does not exist.

    A name that is not installed is no error, so that one list can serve several machines.
    """
    rules = {name.strip(): "plugins.block in the config" for name in configured}
    rules |= {name.strip(): f"the environment variable {VARIABLE}" for name in os.environ.get(VARIABLE, "").split(",")}
    rules.pop("", None)
    for name in rules:
        if ":" in name:
            try:
                get_kind(name.partition(":")[0])
            except PluginError as error:
                raise PluginError(f"{rules[name]} has {name!r}: {error}") from None
    return rules


def blocked_by(rules: Mapping[str, str], kind: str, name: str) -> str | None:
    """Who blocks a plugin, or None if nobody does."""
    return rules.get(f"{kind}:{name}") or rules.get(name)
