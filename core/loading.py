"""Importing one plugin's module, with a reason that a person can act on when that fails.

For the plugin manager. stevedore loads the entry point and isolates its failure; what a loaded module must contain is
left to `rollstock.contract`.
"""

from __future__ import annotations

import traceback
from importlib.metadata import EntryPoint
from types import ModuleType

from stevedore.extension import ExtensionManager

from rollstock.discovery import PluginEntry
from rollstock.errors import PluginError, RollstockError
from rollstock.extras import missing_package
from rollstock.plugin import API_CONSTANT, PLUGIN_API
from rollstock.sources import constant, find_module


class _OneEntryPoint(ExtensionManager[ModuleType]):
    """A stevedore manager of a single entry point, which the catalogue has found already; `failure` is why it did not
    load.
    """

    def __init__(self, point: EntryPoint) -> None:
        self.failure: BaseException | None = None
        self._point = point
        super().__init__(point.group, on_load_failure_callback=_remember)

    def list_entry_points(self) -> list[EntryPoint]:
        return [self._point]


def _remember(manager: ExtensionManager[ModuleType], point: EntryPoint, failure: BaseException) -> None:
    assert isinstance(manager, _OneEntryPoint)
    manager.failure = failure


def load_module(entry: PluginEntry) -> ModuleType:
    """Import the module of a plugin. Raises PluginError with the reason if that fails."""
    if ":" in entry.module:
        raise _error(
            entry, f"its entry point names an object, {entry.module!r}; it must name the module that has the hooks"
        )
    try:
        manager = _OneEntryPoint(entry.entry_point)
        failure = manager.failure
    except (SystemExit, AssertionError) as error:  # the two that stevedore lets through
        failure = error
    if failure is not None:
        check_api(entry, constant(entry.module, API_CONSTANT))  # a plugin for another API may well fail on import
        raise _error(entry, _reason(entry, failure)) from failure
    module: object = manager.extensions[0].plugin
    if not isinstance(module, ModuleType):
        raise _error(entry, f"its entry point {entry.module!r} does not name a module")
    return module


def check_api(entry: PluginEntry, stated: object) -> None:
    """Refuse a plugin that states another API number than this version's; None, not stated, passes."""
    if stated is None or (stated == PLUGIN_API and not isinstance(stated, bool)):
        return
    if not isinstance(stated, int) or isinstance(stated, bool):
        raise _error(entry, f"{API_CONSTANT} must be a whole number, not {stated!r}")
    newer = stated > PLUGIN_API
    advice = (
        "upgrade rollstock"
        if newer
        else f"upgrade {entry.distribution}, or ask its authors for a version for API {PLUGIN_API}"
    )
    raise _error(entry, f"it was written for plugin API {stated}, and this rollstock has API {PLUGIN_API}: {advice}")


def _reason(entry: PluginEntry, failure: BaseException) -> str:
    """Why an import failed: no such module, a package missing, or an exception and where it was raised."""
    if isinstance(failure, RollstockError):
        return str(failure)
    is_own = isinstance(failure, ModuleNotFoundError) and f"{entry.module}.".startswith(f"{failure.name}.")
    if is_own and find_module(entry.module) is None:
        return f"its entry point names the module {entry.module!r}, which does not exist"
    if isinstance(failure, SyntaxError):
        return f"its code is not valid Python: {failure.msg} ({failure.filename}:{failure.lineno})"
    if isinstance(failure, ImportError):
        advice = missing_package(failure, entry.distribution)
        if advice is not None:
            return advice
    frames = [
        frame for frame in traceback.extract_tb(failure.__traceback__) if not frame.filename.startswith("<frozen")
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"importing {entry.module} raised {type(failure).__name__}: {failure}{where}"


def _error(entry: PluginEntry, reason: str) -> PluginError:
    return PluginError(f"plugin {entry.id} of {entry.provenance} cannot be used: {reason}", entry.id)
