"""Plugins that are installed for as long as a test lasts, for every plugin manager of this process.

A `PluginManager.add` makes a plugin known to one manager; a run makes several, one for each worker. Here a plugin
gets what an installed one has: a distribution with metadata and an entry point, in a temporary directory on
`sys.path`.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rollstock.hookspecs import hookimpl
from rollstock.kinds import get_kind
from rollstock.plugin import Plugin

_counter = itertools.count()


@contextmanager
def installed(kind: str, name: str, plugin: type[Plugin[Any]] | ModuleType | str) -> Iterator[None]:
    """Have a plugin installed as `kind:name`, given as its class, its module, or the source text of its module.

    A class or module is known in this process alone. Environments and rewards also run in processes of their own:
    give their source text. Raises PluginError for an unknown kind.
    """
    with tempfile.TemporaryDirectory(prefix="rollstock-") as folder:
        site = Path(folder)
        module = _write(site, kind, plugin)
        info = site / f"{module}-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
        target = plugin.__name__ if isinstance(plugin, ModuleType) else module
        (info / "entry_points.txt").write_text(f"[{get_kind(kind).group}]\n{name} = {target}\n")
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            if folder in sys.path:  # a test that puts back an older path may have been quicker
                sys.path.remove(folder)
            sys.modules.pop(module, None)
            importlib.invalidate_caches()


def _write(site: Path, kind: str, plugin: type[Plugin[Any]] | ModuleType | str) -> str:
    """Make the plugin importable; returns the name of what was made."""
    name = f"rollstock_installed_{next(_counter)}"
    if isinstance(plugin, str):
        (site / f"{name}.py").write_text(plugin, encoding="utf-8")
    elif not isinstance(plugin, ModuleType):
        sys.modules[name] = provider_module(kind, plugin, name)
    return name


def provider_module(kind: str, plugin: type[Plugin[Any]], name: str) -> ModuleType:
    """A module whose provider hook returns the class."""
    hook = get_kind(kind).provider

    def provide() -> type[Plugin[Any]]:
        return plugin

    provide.__name__ = hook
    provide.__module__ = name
    module = ModuleType(name, f"The plugin class {plugin.__name__}, for a test.")
    setattr(module, hook, hookimpl(provide))
    return module
