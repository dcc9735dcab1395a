"""The plugin under test: given as a class, an instance or an installed name, made anew as often as a check needs it.

For the kits, and the one check that all kinds share: that a plugin's options are sound.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from rollstock.contract import check_class
from rollstock.conversion import OptionError, build_config, to_plain
from rollstock.errors import PluginError, UserError
from rollstock.kinds import KINDS
from rollstock.manager import make_manager
from rollstock.options import describe_options
from rollstock.plugin import Plugin
from rollstock.testing.kit import ConformanceError, expect, fail

P = TypeVar("P", bound=Plugin[Any])


class Subject(Generic[P]):
    """A plugin class with its options. `label` names it in errors: `algorithm:grpo`, or the class's name."""

    def __init__(self, interface: type[P], plugin: type[P] | P | str, options: Mapping[str, Any] | None) -> None:
        """Raises ConformanceError for what is no finished plugin of this kind, ValueError for options beside an
        instance."""
        self.kind = next(kind for kind in KINDS.values() if kind.interface == interface.__name__)
        self.label = _label(self.kind.name, plugin)
        self.plugin_name = plugin if isinstance(plugin, str) else ""
        config = None
        try:
            given: object = plugin
            if isinstance(plugin, interface):
                if options is not None:
                    raise ValueError("an instance has its options already: give the class, or leave `options` out")
                given, config = type(plugin), plugin.config
            elif isinstance(plugin, str):
                given = make_manager().load(self.kind.name, plugin)
            self.cls: type[P] = check_class(self.kind, [given], self.label)
            self.config = config or build_config(
                self.cls.config_class(), options or {}, place="options", owner=f"plugin {self.label}"
            )
        except PluginError as error:
            raise ConformanceError(
                str(error), mend="a plugin is a class that fulfils its interface", plugin=self.label, check="class"
            ) from error
        except OptionError as error:
            raise ConformanceError(
                str(error),
                mend="call the kit with `options={...}` that make a plugin which can work",
                plugin=self.label,
                check="options",
            ) from error

    def make(self) -> P:
        """A fresh instance, with options of its own."""
        instance = self.cls(copy.deepcopy(self.config))
        if self.plugin_name:
            instance.plugin_name = self.plugin_name
        return instance


def _label(kind: str, plugin: object) -> str:
    if isinstance(plugin, str):
        return f"{kind}:{plugin}"
    cls = plugin if isinstance(plugin, type) else type(plugin)
    return f"{kind} {cls.__name__}"


def check_options(subject: Subject[Any]) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    for option in describe_options(subject.cls.config_class()):
        expect(
            option.help,
            f"the option {option.name!r} has no help text",
            mend=f"write `{option.name}: {option.type} = option({option.default!r}, 'what it does')`",
        )
    _check_defaults(subject)
    plain = to_plain(subject.config)
    first = subject.make()
    expect(
        to_plain(first.config) == plain,
        f"made from the options {plain}, it has the config {to_plain(first.config)}",
        mend="`__init__(self, config=None)` must call `super().__init__(config)` and leave `self.config` as it is",
    )


def _check_defaults(subject: Subject[Any]) -> None:
    """Each default must survive the trip through a config file; an option without one has the value under test."""
    config_class = subject.cls.config_class()
    values = {}
    for field in dataclasses.fields(config_class):
        if field.init:
            made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            values[field.name] = to_plain(getattr(subject.config, field.name) if made is dataclasses.MISSING else made)
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        fail(
            f"the defaults {values} cannot be written to a config file: {error}",
            mend="use numbers, texts, lists, mappings",
        )
    try:
        build_config(config_class, values, place="options")
    except UserError as error:
        fail(
            f"a default does not fit its own option: {error}",
            mend="change the default, or the type or the bounds that `option` was given",
        )


def check_json(value: object, what: str) -> Any:
    """`value` after a trip through JSON; ConformanceError if it cannot make it, or comes back as something else."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        fail(
            f"{what} is {value!r}, which is no JSON: {error}",
            mend="return dicts with text keys, lists, texts, numbers, bools, None",
        )
    back = json.loads(text)
    expect(
        back == value,
        f"{what} is {value!r}, and {back!r} after a trip through JSON",
        mend="use lists in place of tuples, and texts as keys of dicts",
    )
    return back
