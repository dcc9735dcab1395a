"""The plugins: names claimed twice, plugins that do not work, blocks, and which chips are there."""

from __future__ import annotations

from collections.abc import Iterator

from rollstock.blocking import block_rules, blocked_by
from rollstock.doctor.finding import Finding
from rollstock.errors import UserError
from rollstock.interfaces.device import Device
from rollstock.manager import PluginManager, make_manager
from rollstock.static import missing_extras


def examine_plugins(manager: PluginManager | None = None) -> Iterator[Finding]:
    """Import every installed plugin and see whether it keeps its contract."""
    manager = manager or make_manager()
    for id, reason in manager.catalogue.conflicts.items():
        yield Finding("error", f"plugin {id}", reason, "uninstall one of the two distributions")
    rules = block_rules()
    working: list[str] = []
    for entry in manager.catalogue.values():
        blocker = blocked_by(rules, entry.kind, entry.name)
        if blocker is not None:
            yield Finding("info", f"plugin {entry.id}", f"is blocked by {blocker}")
            continue
        missing = missing_extras(entry)
        failure = manager.check(entry)
        if missing and entry.kind != "device":  # of a chip more is said below
            yield Finding(
                "info", f"plugin {entry.id}", "needs packages that are not installed", f"pip install '{missing[0]}'"
            )
        elif failure is not None and not missing:
            advice = f"mend or uninstall {entry.distribution}; a run that does not name it goes on without it"
            yield Finding("warning", f"plugin {entry.id}", failure, advice)
        else:
            working.append(entry.distribution)
    yield Finding("ok", "plugins", f"{len(working)} work, from {', '.join(sorted(set(working))) or 'nowhere'}")
    yield from _chips(manager)


def _chips(manager: PluginManager) -> Iterator[Finding]:
    for name, entry in manager.catalogue.of_kind("device").items():
        if entry.id in manager.broken:
            continue
        try:
            device = manager.create_as(Device, {"name": name})
            reason = device.unavailable()
            count = device.count()
        except UserError as error:
            reason, count = str(error), 0
        if reason is None:
            yield Finding("ok", f"device {name}", f"{count} of them")
        else:
            yield Finding("info", f"device {name}", reason)
