"""Which plugins are installed: their names, modules, and the distributions that they came with. Nothing is imported.

For the plugin manager and the commands that list plugins. Entry points are read from the installed distributions'
metadata in one pass, because the list must know the distribution of each: stevedore's cached list has dropped it, and
with it one of two distributions that claim the same name with the same module. Loading is left to `rollstock.manager`,
through stevedore.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint

from rollstock.errors import PluginError, suggest
from rollstock.extras import normalise
from rollstock.kinds import KINDS, get_kind
from rollstock.sources import summary


@dataclass(frozen=True)
class PluginEntry:
    """One installed plugin, as its entry point states it; `distribution` and `version` say what it came with."""

    kind: str
    name: str
    module: str
    distribution: str
    version: str
    entry_point: EntryPoint = field(repr=False, compare=False)

    @property
    def id(self) -> str:
        """`kind:name`."""
        return f"{self.kind}:{self.name}"

    @property
    def provenance(self) -> str:
        """`distribution version`."""
        return f"{self.distribution} {self.version}".strip()

    @property
    def summary(self) -> str:
        """The first line of the module's docstring, read from its source."""
        return summary(self.module)


class Catalogue(Mapping[str, PluginEntry]):
    """The installed plugins by `kind:name`, in the order of kinds, then names; `conflicts` has the names claimed twice.

    A name that two distributions claim is in `conflicts` with the reason, and not among the plugins: neither wins.
    `strays` has a sentence for each entry point of a group that looks like one of rollstock's and is none.
    """

    def __init__(self, entries: Iterable[PluginEntry], strays: Iterable[str] = ()) -> None:
        self.strays = sorted(strays)
        order = list(KINDS)
        claims: dict[str, dict[tuple[str, str], PluginEntry]] = {}
        for entry in sorted(entries, key=lambda e: (order.index(e.kind), e.name, e.distribution, e.module)):
            claims.setdefault(entry.id, {})[entry.distribution, entry.module] = entry
        self._entries = {id: next(iter(claim.values())) for id, claim in claims.items() if len(claim) == 1}
        self.conflicts = {id: _conflict(id, list(claim.values())) for id, claim in claims.items() if len(claim) > 1}

    def __getitem__(self, id: str) -> PluginEntry:
        return self._entries[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def of_kind(self, kind: str) -> dict[str, PluginEntry]:
        """The plugins of one kind by name. Raises PluginError for a kind that does not exist."""
        get_kind(kind)
        return {entry.name: entry for entry in self._entries.values() if entry.kind == kind}

    def select(self, query: str) -> list[PluginEntry]:
        """The plugins that `query` means: `kind:name`, a kind, or a name (of any kind).

        Raises PluginError if there is none, or if two distributions claim the name.
        """
        if query in self.conflicts:
            raise PluginError(self.conflicts[query], query)
        found = [entry for entry in self.values() if query in (entry.id, entry.kind, entry.name)]
        if not found:
            names = {*self, *KINDS, *(entry.name for entry in self.values())} if ":" not in query else set(self)
            raise PluginError(f"there is no plugin {query!r}. {suggest(query, names)}", query)
        return found


def _conflict(id: str, claims: list[PluginEntry]) -> str:
    listed = " and ".join(f"{entry.provenance} ({entry.module})" for entry in claims)
    return f"the plugin name {id} is claimed twice, by {listed}: uninstall one of them (pip uninstall ...)"


def discover() -> Catalogue:
    """Read the entry points of every installed distribution; where one is installed twice, the first on `sys.path`
    counts.
    """
    groups = {kind.group: kind.name for kind in KINDS.values()}
    entries: list[PluginEntry] = []
    seen: set[str] = set()
    strays: list[str] = []
    for distribution in importlib.metadata.distributions():
        points = [point for point in distribution.entry_points if point.group.startswith("rollstock.")]
        if not points:
            continue
        name, version = _identity(distribution)
        if normalise(name) not in seen:
            seen.add(normalise(name))
            found = [point for point in points if point.group in groups]
            entries += [PluginEntry(groups[p.group], p.name, p.value.strip(), name, version, p) for p in found]
            strays += [_stray(p, f"{name} {version}", groups) for p in points if p.group not in groups]
    return Catalogue(entries, strays)


def _stray(point: EntryPoint, provenance: str, groups: Mapping[str, str]) -> str:
    where = f"{provenance} has {point.name!r} in the entry-point group {point.group!r}"
    return f"{where}, which is none. {suggest(point.group, groups)}"


def _identity(distribution: Distribution) -> tuple[str, str]:
    """Name and version, from the first lines of the metadata: parsing the whole costs more than all the rest of a
    listing.
    """
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    headers = dict(line.split(": ", 1) for line in text.partition("\n\n")[0].splitlines() if ": " in line)
    return headers.get("Name", "unknown distribution").strip(), headers.get("Version", "").strip()
