"""The plugin manager: the one door between the core and plugins, and the typed front of pluggy and stevedore.

For the parts of the core that choose plugins by name. A manager is made by `make_manager`, one per process; a worker
makes its own from the run's config. It imports only what it is asked for, checks that before anything is registered,
and keeps the reasons of what failed in `broken`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from rollstock import hookspecs
from rollstock.blocking import block_rules, blocked_by
from rollstock.contract import HookFunction, check_class, check_provider, hook_functions
from rollstock.conversion import build_config, to_plain
from rollstock.discovery import Catalogue, PluginEntry, discover
from rollstock.errors import PluginError, UserError, suggest
from rollstock.extras import extra_named, missing_package
from rollstock.hookguard import GuardedHooks
from rollstock.kinds import KINDS, Kind, get_kind
from rollstock.loading import check_api, load_module
from rollstock.plugin import API_CONSTANT, Plugin
from rollstock.section import Section, origin_of, place_of

P = TypeVar("P", bound=Plugin[Any])


class PluginManager:
    """Finds, imports, checks, registers and makes plugins.

    catalogue: what is installed; blocked: `name` or `kind:name` that must not be used, each with who says so.
    `broken` maps `kind:name` to the reason for every plugin that could not be used so far.
    """

    def __init__(self, catalogue: Catalogue, blocked: Mapping[str, str]) -> None:
        self.catalogue = catalogue
        self.blocked = dict(blocked)
        self.broken: dict[str, str] = dict(catalogue.conflicts)
        self._added: dict[str, tuple[PluginEntry, ModuleType]] = {}
        self._classes: dict[str, type[Plugin[Any]]] = {}
        self._modules: set[str] = set()
        self._pluggy = pluggy.PluginManager("rollstock")
        self._pluggy.add_hookspecs(hookspecs)

    @property
    def hook(self) -> pluggy.HookRelay:
        """The hooks, to be called with keywords; an exception carries the name of the plugin that raised it as a
        note.
        """
        return self._pluggy.hook

    def add(self, kind: str, name: str, module: ModuleType) -> None:
        """Make a module known as `kind:name` without installing it; for tests and programs that bring a plugin along.

        It goes through the same checks as an installed one when it is loaded. Raises PluginError if the name is taken.
        """
        id = f"{kind}:{name}"
        if self.entry(id) is not None or id in self.catalogue.conflicts:
            raise PluginError(f"the plugin name {id} is taken: choose another", id)
        point = EntryPoint(name, module.__name__, get_kind(kind).group)
        self._added[id] = PluginEntry(kind, name, module.__name__, "this process", "", point), module

    def entry(self, id: str) -> PluginEntry | None:
        """What is known of the plugin `kind:name`; None if there is none, or two distributions claim the name."""
        return self._added[id][0] if id in self._added else self.catalogue.get(id)

    def register(self, name: str, plugin: object) -> None:
        """Register the hooks of an object that no config names, such as the core's own stages. Raises PluginError as
        `load` does.
        """
        self._register(name, hook_functions(plugin, name, self._pluggy))

    def load(self, kind: str, name: str) -> type[Plugin[Any]]:
        """The class of a plugin; imports, checks and registers its module at the first call.

        Raises PluginError with the reason if there is no such plugin, it is blocked, its import fails or it breaks its
        contract.
        """
        id = f"{kind}:{name}"
        if id not in self._classes:
            try:
                self._classes[id] = self._load(get_kind(kind), name)
            except PluginError as error:
                if self.entry(id) is not None:
                    self.broken[id] = str(error)
                raise
        return self._classes[id]

    def create(self, kind: str, section: Mapping[str, Any]) -> Any:
        """An instance of the plugin that a section of the config names, made from its options; its hooks are
        registered.

        section: `{name: ..., <options>}`. Raises PluginError as `load` does, and OptionError for an option that does
        not fit.
        """
        instance = self._make(kind, section)
        self._register_instance(kind, instance)
        return instance

    def create_as(self, interface: type[P], section: Mapping[str, Any]) -> P:
        """`create`, for the kind whose interface is given, and typed as that interface."""
        instance: P = self.create(_kind_of(interface), section)
        return instance

    def load_as(self, interface: type[P], section: Mapping[str, Any]) -> type[P]:
        """`load` for the plugin that a section of the config names, typed as its kind's interface."""
        cls: Any = self._named(get_kind(_kind_of(interface)), section)
        found: type[P] = cls
        return found

    def create_all(self, interface: type[P], sections: Sequence[Mapping[str, Any]]) -> list[P]:
        """`create_as` for a list of sections; where several wrap one stage, the first in the list is outermost."""
        kind = _kind_of(interface)
        instances = [self._make(kind, section) for section in sections]
        for instance in reversed(instances):  # pluggy calls first what was registered last
            self._register_instance(kind, instance)
        return instances

    def complete(self, kind: str, section: Mapping[str, Any]) -> Section:
        """The section with every option of its plugin, defaults filled in, as plain data. Raises as `create` does."""
        options = to_plain(self._configure(get_kind(kind), section))
        own = {key: section[key] for key in get_kind(kind).core_options if key in section}
        origins = {"": "default", **getattr(section, "origins", {})}
        cls = type(section) if isinstance(section, Section) else Section
        return cls({**own, **options}, place=place_of(section), origins=origins)

    def loaded(self) -> list[PluginEntry]:
        """The installed plugins that were loaded so far, for the record of a run."""
        return [self.catalogue[id] for id in self._classes if id in self.catalogue]

    def check(self, entry: PluginEntry) -> str | None:
        """Load one plugin; the reason why it cannot be used, or None."""
        try:
            self.load(entry.kind, entry.name)
        except PluginError as error:
            return str(error)
        return None

    def _make(self, kind: str, section: Mapping[str, Any]) -> Any:
        config = self._configure(get_kind(kind), section)
        name = section["name"]
        id = f"{kind}:{name}"
        try:
            cls = self.load(kind, name)
            instance = cls.__new__(cls)
            instance.plugin_name = name  # what it raises while it is made can already say so
            cls.__init__(instance, config)
        except UserError as error:
            error.add_note(f"raised by plugin {id} when it was made")
            raise
        except Exception as error:
            entry = self.entry(id)
            reason = missing_package(error, entry.distribution) if entry and isinstance(error, ImportError) else None
            reason = reason or f"making it raised {type(error).__name__}: {error}"
            raise PluginError(f"{_at(section)}plugin {id} cannot be used: {reason}", id) from error
        instance.plugin_name = name
        return instance

    def _configure(self, kind: Kind, section: Mapping[str, Any]) -> Any:
        """The config object of the plugin that a section names."""
        cls = self._named(kind, section)
        options = {key: value for key, value in section.items() if key not in kind.core_options}
        place, origins = place_of(section, kind.name), getattr(section, "origins", {})
        plain = Section(options, place=place, origins=origins)
        return build_config(cls.config_class(), plain, place=place, owner=f"plugin {kind.name}:{section['name']}")

    def _named(self, kind: Kind, section: Mapping[str, Any]) -> type[Plugin[Any]]:
        """The class of the plugin that a section names; the section's place is in the error."""
        name = section.get("name")
        if not isinstance(name, str):
            raise PluginError(f"{place_of(section, kind.name)} must say which {kind.name} it means: {{name: ...}}")
        try:
            return self.load(kind.name, name)
        except PluginError as error:
            raise PluginError(f"{_at(section)}{error}", error.plugin) from error

    def _load(self, kind: Kind, name: str) -> type[Plugin[Any]]:
        id = f"{kind.name}:{name}"
        blocker = blocked_by(self.blocked, kind.name, name)
        if blocker is not None:
            raise PluginError(f"plugin {id} is blocked by {blocker}: choose another {kind.name}, or lift the block", id)
        if id in self.catalogue.conflicts:
            raise PluginError(self.catalogue.conflicts[id], id)
        entry = self.entry(id)
        if entry is None:
            raise PluginError(self._not_found(kind, name), id)
        module = self._added[id][1] if id in self._added else load_module(entry)
        check_api(entry, getattr(module, API_CONSTANT, None))
        return self._adopt(kind, id, module)

    def _adopt(self, kind: Kind, id: str, module: ModuleType) -> type[Plugin[Any]]:
        """Check and register a module's hooks, then ask its provider hook for the class."""
        hooks = hook_functions(module, id, self._pluggy)
        check_provider(kind, {hook.name for hook in hooks}, id)
        if module.__name__ in self._modules:  # it is in as another kind: its listeners must not be called twice
            hooks = [hook for hook in hooks if hook.name == kind.provider]
        guarded = self._register(id, hooks)
        others = [plugin for plugin in self._pluggy.get_plugins() if plugin is not guarded]
        try:
            cls = check_class(kind, self._pluggy.subset_hook_caller(kind.provider, others)(), id)
        except BaseException as error:
            self._pluggy.unregister(guarded)
            if isinstance(error, Exception) and not isinstance(error, PluginError):
                raise PluginError(f"plugin {id}: {kind.provider} raised {type(error).__name__}: {error}", id) from error
            raise
        self._modules.add(module.__name__)
        return cls

    def _register_instance(self, kind: str, instance: Plugin[Any]) -> None:
        """Register the hooks that an instance has as methods, if any, as `kind:name/instance` (`/instance-2`, ...)."""
        id = f"{kind}:{instance.plugin_name}"
        hooks = hook_functions(instance, id, self._pluggy)
        if not hooks:
            return
        name, count = f"{id}/instance", 1
        while self._pluggy.has_plugin(name):
            count += 1
            name = f"{id}/instance-{count}"
        self._register(name, hooks)

    def _register(self, name: str, hooks: list[HookFunction]) -> GuardedHooks:
        guarded = GuardedHooks(name, hooks)
        try:
            self._pluggy.register(guarded, name)
            self._pluggy.check_pending()
        except pluggy.PluginValidationError as error:
            self._pluggy.unregister(name=name)
            raise PluginError(f"plugin {name}: {error}", name) from error
        return guarded

    def _not_found(self, kind: Kind, name: str) -> str:
        """Why there is no such plugin, and what may be meant: a near name, another kind, an extra.

        Entry points are there with their distribution, so an extra of it brings no plugin of its own.
        """
        known = [entry.name for entry in self.catalogue.values() if entry.kind == kind.name]
        known += [entry.name for entry, _ in self._added.values() if entry.kind == kind.name]
        parts = [f"there is no {kind.name} {name!r}. {suggest(name, known)}"]
        elsewhere = sorted(other for other in KINDS if self.entry(f"{other}:{name}") is not None)
        if elsewhere:
            parts.append(f"{name!r} is the name of a plugin of another kind: {', '.join(elsewhere)}.")
        parts += [stray for stray in self.catalogue.strays if f" has {name!r} in " in stray]
        extra = extra_named(name, sorted({entry.distribution for entry in self.catalogue.values()}))
        if extra is not None:
            parts.append(
                f"{extra.partition('[')[0]} itself has no {kind.name} of this name; its extra (pip install '{extra}') "
                "brings packages that one may build on."
            )
        parts.append(
            f"A plugin of another package is found once that is installed (pip install ...); "
            f"`rollstock plugins {kind.name}` lists what is there."
        )
        return " ".join(parts)


def _kind_of(interface: type[Plugin[Any]]) -> str:
    """The kind whose interface is given; TypeError if there is none."""
    for kind in KINDS.values():
        if kind.interface == interface.__name__ and kind.interface_class() is interface:
            return kind.name
    raise TypeError(f"{interface!r} is not the interface of a plugin kind")


def _at(section: Mapping[str, Any]) -> str:
    """`demo.yaml:12: ` for a section of a file, else nothing."""
    origin = origin_of(section, "name")
    return f"{origin}: " if origin else ""


def make_manager(block: Iterable[str] = (), *, catalogue: Catalogue | None = None) -> PluginManager:
    """A manager of this process's installed plugins.

    block: `plugins.block` of the config; the environment variable ROLLSTOCK_BLOCK_PLUGINS adds to it. catalogue: what
    is installed, if that was read already. Raises PluginError for a block of a kind that does not exist.
    """
    return PluginManager(discover() if catalogue is None else catalogue, block_rules(block))
