"""Optional packages: which extra of which distribution brings a package that is missing.

For errors that say what to install. Everything is read from the metadata of the installed distributions, so that the
extras of a third party's package are known as well as rollstock's own. For plugins, `import_optional` imports a package
or says that.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Iterable
from types import ModuleType

from rollstock.errors import PluginError

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


def normalise(name: str) -> str:
    """A distribution's name as the package index compares it: `reasoning_gym` and `Reasoning-Gym` are
    `reasoning-gym`.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def extras_of(distribution: str) -> dict[str, set[str]]:
    """The extras of an installed distribution, each with the (normalised) names of the packages that it brings."""
    try:
        metadata = importlib.metadata.metadata(distribution)
    except importlib.metadata.PackageNotFoundError:
        return {}
    extras: dict[str, set[str]] = {extra: set() for extra in metadata.get_all("Provides-Extra") or ()}
    for requirement in metadata.get_all("Requires-Dist") or ():
        name, extra = _REQUIREMENT.match(requirement), _EXTRA.search(requirement)
        if name and extra:
            extras.setdefault(extra.group(1), set()).add(normalise(name.group(1)))
    return extras


def extra_for(module: str, distributions: Iterable[str]) -> str | None:
    """`distribution[extra]` whose packages include the one that `module` (or a package around it) belongs to, or None.

    A package is known by its normalised name: `megatron.core` belongs to `megatron-core`, `wandb.sdk` to `wandb`.
    """
    parts = module.split(".")
    names = [normalise(".".join(parts[:length])) for length in range(len(parts), 0, -1)]
    for distribution in distributions:
        for name in names:
            for extra, packages in extras_of(distribution).items():
                if name in packages and extra != "dev":
                    return f"{distribution}[{extra}]"
    return None


def extra_named(name: str, distributions: Iterable[str]) -> str | None:
    """`distribution[extra]` for a plugin's name that is also an extra, or a package that an extra brings; None if it is
    neither.
    """
    for distribution in distributions:
        if name in extras_of(distribution):
            return f"{distribution}[{name}]"
    return extra_for(name, distributions)


def missing_package(error: ImportError, distribution: str) -> str | None:
    """What to do about an ImportError in a plugin of `distribution`, if the cause is a package that is not installed.

    None if the package is there and itself broken, or if the missing module belongs to the plugin's own code.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    extra = extra_for(error.name, [distribution])
    if extra is not None:
        return f"it needs the package {error.name!r}, which is not installed: pip install '{extra}'"
    return f"it needs the module {error.name!r}, which is not installed, and no extra of {distribution} brings it"


def import_optional(module: str, *, needed_by: object) -> ModuleType:
    """Import a package that only some runs need, for the plugin (instance, class or name) `needed_by`.

    Raises PluginError with the extra to install if it is missing, and with the cause if it is there but does not
    import.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        plugin = _plugin_name(needed_by)
        advice = missing_package(error, _distribution_of(needed_by))
        reason = advice or f"the package {module!r} is installed but does not import: {error}"
        raise PluginError(f"plugin {plugin} cannot be used: {reason}", plugin) from error


def _plugin_name(plugin: object) -> str:
    if isinstance(plugin, str):
        return plugin
    return str(getattr(plugin, "plugin_name", "") or getattr(plugin, "__name__", "") or type(plugin).__name__)


def _distribution_of(plugin: object) -> str:
    """The distribution that holds a plugin: the one whose entry point names its module or a package around it."""
    from rollstock.discovery import discover

    name = plugin if isinstance(plugin, str) else ""
    module = getattr(plugin, "__module__", "") if isinstance(plugin, type) else type(plugin).__module__
    for entry in discover().values():
        if name in (entry.id, entry.name) or f"{module}.".startswith(f"{entry.module}."):
            return entry.distribution
    return "rollstock"
