"""Every kind and every hook, driven through the real manager by toy plugins."""

import inspect
from importlib.metadata import distribution
from types import ModuleType
from typing import Any

import pytest

from rollstock import hookimpl, hookspecs
from rollstock.errors import PluginError
from rollstock.kinds import KINDS, Kind, get_kind
from rollstock.manager import make_manager

HOOKS = {name: function for name, function in vars(hookspecs).items() if name.startswith("rollstock_")}
LIFE = {name: function for name, function in HOOKS.items() if name.removeprefix("rollstock_") not in KINDS}


def toy_class(kind: Kind) -> type[Any]:
    """The smallest finished subclass of a kind's interface."""
    interface = kind.interface_class()
    methods = {name: lambda self, *arguments, **options: None for name in interface.__abstractmethods__}
    return type("Toy", (interface,), methods)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_toy_plugin_of_each_kind_is_provided_checked_and_made(kind: Kind) -> None:
    toy = toy_class(kind)
    module = ModuleType(f"toy_{kind.name}")
    setattr(module, kind.provider, hookimpl(lambda: toy))
    manager = make_manager()
    manager.add(kind.name, "toy", module)
    made = manager.create(kind.name, {"name": "toy"})
    assert type(made) is toy
    assert made.plugin_name == "toy"
    assert getattr(manager.hook, kind.provider)() == [toy]


@pytest.mark.parametrize("name", LIFE)
def test_each_hook_of_a_run_reaches_a_plugin_with_the_arguments_of_its_hookspec(name: str) -> None:
    arguments = list(inspect.signature(LIFE[name]).parameters)
    heard: list[tuple[Any, ...]] = []
    scope: dict[str, Any] = {"heard": heard}
    exec(
        f"def {name}({', '.join(arguments)}):\n    heard.append(({', '.join(arguments)},))\n    return 'answer'", scope
    )
    module = ModuleType("listening")
    setattr(module, name, hookimpl(scope[name]))
    manager = make_manager()
    manager.register("listening", module)
    values = {argument: object() for argument in arguments}
    result = getattr(manager.hook, name)(**values)
    assert heard == [tuple(values.values())]
    first_result = LIFE[name].rollstock_spec["firstresult"]  # type: ignore[attr-defined]
    assert result == ("answer" if first_result else ["answer"])


def test_every_kind_has_a_provider_hook_and_every_provider_hook_a_kind() -> None:
    assert {kind.provider for kind in KINDS.values()} == set(HOOKS) - set(LIFE)


def test_kinds_come_in_the_order_of_their_hooks() -> None:
    assert [kind.provider for kind in KINDS.values()] == [name for name in HOOKS if name not in LIFE]


def test_every_entry_point_group_of_rollstock_is_a_kind() -> None:
    groups = {point.group for point in distribution("rollstock").entry_points} - {"console_scripts", "pytest11"}
    assert groups <= {kind.group for kind in KINDS.values()}


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"no plugin kind 'trackers'. Did you mean 'tracker'"):
        get_kind("trackers")
