"""Options: how the fields of a config dataclass state their default, help and bounds, and how they are described.

For plugin authors, who write `group_size: int = option(8, "samples per prompt", minimum=2)`, and for whatever lists
options. Checking values against them is left to `rollstock.conversion`.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union

from rollstock.errors import PluginError

T = TypeVar("T")

_KEY: Final = "rollstock.option"


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()
"""The default of an option that has none: `path: str = option(REQUIRED, "the file to read")`."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option as a person reads it; `default` is `REQUIRED` where the user must give a value."""

    name: str
    type: str
    default: Any
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[Any, ...] | None = None

    @property
    def required(self) -> bool:
        """Whether the option has no default."""
        return self.default is REQUIRED

    @property
    def shown_default(self) -> str:
        """The default as a config spells it; `required` where there is none."""
        if self.required or self.default is None:
            return "required" if self.required else "none"
        return str(self.default).lower() if isinstance(self.default, bool) else repr(self.default)

    @property
    def bounds(self) -> str:
        """What its value must keep to besides its type, in words: `at least 1, at most 9`; empty if nothing."""
        limits = [
            f"at least {self.minimum:g}" if self.minimum is not None else "",
            f"at most {self.maximum:g}" if self.maximum is not None else "",
            f"one of {', '.join(map(str, self.choices))}" if self.choices else "",
        ]
        return ", ".join(limit for limit in limits if limit)


def option(
    default: T,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[Any] | None = None,
) -> T:
    """A dataclass field that is an option of a plugin or of the core.

    `default` may be mutable: every config gets a copy of its own. `minimum` and `maximum` (both included) bound a
    number, or each number of a list; `choices` lists the values allowed, where a `Literal` type does not already.
    TypeError without a help text.
    """
    if not isinstance(help, str) or not help.strip():
        raise TypeError("an option needs a help text: option(default, 'what it does')")
    metadata = {_KEY: {"help": help, "minimum": minimum, "maximum": maximum, "choices": choices and tuple(choices)}}
    if default is REQUIRED:
        field = dataclasses.field(metadata=metadata, kw_only=True)
    elif _is_mutable(default):
        field = dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata, kw_only=True)
    else:
        field = dataclasses.field(default=default, metadata=metadata, kw_only=True)
    return typing.cast(T, field)


def _is_mutable(value: object) -> bool:
    return isinstance(value, (list, dict, set)) or dataclasses.is_dataclass(value)


def field_types(config_class: type[Any]) -> dict[str, Any]:
    """The resolved type of every field of a config dataclass.

    Raises PluginError if it is no dataclass, or if an annotation names something that does not exist at run time.
    """
    if not (isinstance(config_class, type) and dataclasses.is_dataclass(config_class)):
        raise PluginError(f"{config_class!r} is no config: a plugin's options are a @dataclass(kw_only=True) class")
    try:
        hints = typing.get_type_hints(config_class)
    except Exception as error:
        raise PluginError(
            f"the option types of {config_class.__module__}.{config_class.__qualname__} cannot be resolved ({error}): "
            f"import them outside `if TYPE_CHECKING`, and define the class at the top of its module"
        ) from error
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


def describe_options(config_class: type[Any]) -> list[Option]:
    """The options of a config dataclass, in the order in which it defines them. Raises PluginError as `field_types`
    does.
    """
    return list(_describe(config_class, "", None))


def _describe(config_class: type[Any], prefix: str, instance: object) -> Iterator[Option]:
    """The options of a dataclass, those of the dataclasses within it under dotted names; defaults as `instance` has
    them.
    """
    types = field_types(config_class)
    for field in dataclasses.fields(config_class):
        if not field.init:
            continue
        name, hint = f"{prefix}{field.name}", types[field.name]
        default = _default(field) if instance is None else getattr(instance, field.name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _describe(hint, f"{name}.", None if default is REQUIRED else default)
        else:
            yield Option(name=name, type=type_name(hint), default=default, **constraints(field))


def constraints(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """The help, minimum, maximum and choices of a field; without help and bounds for a field not made by `option`."""
    stated: dict[str, Any] = field.metadata.get(_KEY, {"help": "", "minimum": None, "maximum": None, "choices": None})
    return stated


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED


def type_name(hint: Any) -> str:
    """A type as help texts and errors spell it: `int`, `list[str]`, `'mean' | 'sum' | none`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is NoneType:
        return "none"
    if hint is Any:
        return "any"
    if origin is Literal:
        return " | ".join(repr(value) for value in arguments)
    if origin in (Union, UnionType):
        return " | ".join(type_name(argument) for argument in arguments)
    if origin is not None:
        shown = ["..." if argument is Ellipsis else type_name(argument) for argument in arguments]
        return f"{getattr(origin, '__name__', origin)}[{', '.join(shown)}]"
    return str(getattr(hint, "option_type", "") or getattr(hint, "__name__", hint))
