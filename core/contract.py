"""What a plugin must get right: its hooks, their arguments, and the class that its provider returns.

For the plugin manager, which checks before it registers anything: pluggy alone lets a misspelt hook and an undecorated
function pass in silence. Each mistake has an error of its own, which says what to write.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pluggy

from rollstock.errors import PluginError, nearest, suggest
from rollstock.kinds import KINDS, Kind
from rollstock.options import describe_options

_MARK = "rollstock_impl"  # the attribute that pluggy's HookimplMarker("rollstock") leaves on a function


@dataclass(frozen=True)
class HookFunction:
    """A function or bound method marked with `@hookimpl`, and the options that it was marked with.

    name: of the hook; attribute: the name that the function goes by, which is the same unless `specname` says
    otherwise.
    """

    name: str
    attribute: str
    function: Callable[..., Any]
    options: Mapping[str, Any]


def hook_functions(plugin: object, label: str, manager: pluggy.PluginManager) -> list[HookFunction]:
    """The hook implementations of a module or an instance, checked against the hookspecs.

    Raises PluginError, naming the plugin (`label`) and the function, for an unknown hook, arguments that the hookspec
    does not have or that have defaults, a generator that is no wrapper, a coroutine, or a hook that is not marked.
    """
    specs = {name for name in vars(manager.hook) if not name.startswith("_")}
    found = []
    for name, function in _callables(plugin):
        options = getattr(function, _MARK, None)
        if options is None:
            _refuse_unmarked(name, function, plugin, label, specs)
            continue
        hook = HookFunction(options.get("specname") or name, name, function, options)
        if hook.name not in specs:
            if options.get("optionalhook"):
                continue
            raise PluginError(
                f"plugin {label} implements {name}, and there is no such hook. {suggest(hook.name, specs)}", label
            )
        caller: pluggy.HookCaller = getattr(manager.hook, hook.name)
        assert caller.spec is not None
        _check_signature(hook, label, tuple(caller.spec.argnames))
        found.append(hook)
    return found


def _callables(plugin: object) -> list[tuple[str, Callable[..., Any]]]:
    """Functions of a module, or bound methods of an instance, without running any property."""
    if inspect.ismodule(plugin):
        return [(name, value) for name, value in vars(plugin).items() if inspect.isroutine(value)]
    names = [name for name in dir(type(plugin)) if _is_method(inspect.getattr_static(type(plugin), name, None))]
    own = [name for name in getattr(plugin, "__dict__", {}) if inspect.isroutine(vars(plugin)[name])]
    return [(name, getattr(plugin, name)) for name in [*names, *own] if not name.startswith("__")]


def _is_method(attribute: object) -> bool:
    """Whether a class's attribute is a method; a `cached_property` passes for a routine, and would be computed."""
    return inspect.isroutine(attribute) and not isinstance(attribute, functools.cached_property)


def _refuse_unmarked(name: str, function: Callable[..., Any], plugin: object, label: str, specs: set[str]) -> None:
    imported = inspect.ismodule(plugin) and getattr(function, "__module__", None) != plugin.__name__
    if name in specs and not imported:
        raise PluginError(f"plugin {label} has a function {name} that is not marked: put @hookimpl above it", label)


def _check_signature(hook: HookFunction, label: str, allowed: tuple[str, ...]) -> None:
    where = f"plugin {label}: the hook {hook.name}"
    expected = f"{hook.name}({', '.join(allowed)})"
    if hook.options.get("hookwrapper"):
        raise PluginError(f"{where} is marked hookwrapper=True, the old way: write @hookimpl(wrapper=True)", label)
    if inspect.iscoroutinefunction(hook.function) or inspect.isasyncgenfunction(hook.function):
        raise PluginError(f"{where} is `async def`, and hooks are called without an event loop: write `def`", label)
    if bool(hook.options.get("wrapper")) != inspect.isgeneratorfunction(hook.function):
        advice = "has no yield" if hook.options.get("wrapper") else "yields: mark it @hookimpl(wrapper=True)"
        raise PluginError(f"{where} is a wrapper exactly if it yields once, and it {advice}", label)
    for parameter in inspect.signature(hook.function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise PluginError(f"{where} has the argument {parameter}; hooks take plain ones: {expected}", label)
        if parameter.name not in allowed:
            near = nearest(parameter.name, allowed)
            question = f"; did you mean {near[0]!r}?" if near else ""
            raise PluginError(
                f"{where} takes {parameter.name!r}, which the hookspec has not{question} It is {expected}", label
            )
        if parameter.default is not parameter.empty:
            raise PluginError(
                f"{where} gives {parameter.name!r} a default, so that it would never be passed: remove it", label
            )


def check_provider(kind: Kind, names: set[str], label: str) -> None:
    """Refuse a module without the provider hook of its kind; `names` are the hooks that it has."""
    if kind.provider in names:
        return
    others = sorted(other.name for other in KINDS.values() if other.provider in names)
    has = f" (it provides a plugin of another kind, {', '.join(others)})" if others else ""
    raise PluginError(
        f"plugin {label} has no provider hook{has}: its module needs "
        f"`@hookimpl def {kind.provider}(): return <a subclass of rollstock.{kind.interface}>`",
        label,
    )


def check_class(kind: Kind, provided: list[Any], label: str) -> type[Any]:
    """The plugin class among what the provider hook gave; PluginError if it is no finished subclass of the kind's
    interface.
    """
    wanted = f"{kind.provider} of plugin {label} must return a subclass of rollstock.{kind.interface}"
    if not provided:
        raise PluginError(f"{wanted}, not None", label)
    found = provided[0]
    interface = kind.interface_class()
    if isinstance(found, interface):
        raise PluginError(f"{wanted}, not an instance of one: write `return {type(found).__name__}`", label)
    if not isinstance(found, type):
        raise PluginError(f"{wanted}, not {found!r}", label)
    if not issubclass(found, interface):
        raise PluginError(
            f"{wanted}, and {found.__name__} is none: write `class {found.__name__}({kind.interface}[...])`", label
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise PluginError(f"plugin {label} is not finished: {found.__name__} lacks {', '.join(missing)}", label)
    _check_options(kind, found, label)
    return found


def _check_options(kind: Kind, found: type[Any], label: str) -> None:
    try:
        options = describe_options(found.config_class())
    except PluginError as error:
        raise PluginError(f"plugin {label}: {error}", label) from error
    for taken in {option.name.partition(".")[0] for option in options} & set(kind.core_options):
        raise PluginError(
            f"plugin {label} has an option {taken!r}, a name that the core keeps for itself: rename it", label
        )
