"""From the plain values of a config to a typed config dataclass, with an error that names the option for whatever does
not fit.

And back, with `to_plain`. For the config loader and the plugin manager. How options are declared is in
`rollstock.options`.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union

from rollstock.errors import ConfigError, PluginError, suggest
from rollstock.options import constraints, field_types, type_name
from rollstock.section import is_finite, origin_of

T = TypeVar("T")

_OWNER = "<owner>"  # stands in a reason for whoever has the options
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class OptionError(ConfigError):
    """One value of a config does not fit; `path` is the option's dotted path in the config."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class _MisfitError(Exception):
    """A value at `path` (relative to the object being built) does not fit, for `reason`, which continues "<option>
    ...".
    """

    def __init__(self, path: str, reason: str, help: str = "") -> None:
        super().__init__(reason)
        self.path, self.reason, self.help = path, reason, help


def build_config(config_class: type[T], values: Mapping[str, Any], *, place: str = "", owner: str = "") -> T:
    """Make a config dataclass from plain values: types and bounds checked, defaults filled in, unknown keys refused.

    place: where the values stand in the config, `algorithm`; owner: whose options they are, `plugin algorithm:grpo`;
    both for the error. Whole numbers do for floats, `1e-5` in quotes too; nothing else is converted. Raises OptionError
    for the first value that does not fit, PluginError if the class itself is unfit.
    """
    try:
        return _build(config_class, values, "")
    except _MisfitError as misfit:
        full = _join(place, misfit.path)
        origin = origin_of(values, misfit.path)
        reason = misfit.reason.replace(_OWNER, owner or full.rpartition(".")[0] or "the config")
        about = [part for part in (owner if _OWNER not in misfit.reason else "", misfit.help) if part]
        details = f" ({'; '.join(about)})" if about else ""
        message = f"{full or 'the config'} {reason}{details}"
        raise OptionError(f"{origin}: {message}" if origin else message, full) from None


def to_plain(value: Any) -> Any:
    """A config dataclass as plain data: mappings, lists, texts, numbers, bools and None, as a config file holds
    them.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(to_plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _build(config_class: type[T], values: Any, path: str) -> T:
    if isinstance(values, config_class):
        return values
    if not isinstance(values, Mapping):
        raise _MisfitError(path, f"must be a mapping of options, not {_show(values)}")
    types = field_types(config_class)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, config_class)) if field.init}
    for key in values:
        if key not in fields:
            raise _MisfitError(_join(path, str(key)), f"is not an option of {_OWNER}. {suggest(str(key), fields)}")
    arguments = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = _convert_field(values[name], types[name], field, _join(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            help = constraints(field)["help"]
            what = "a mapping of options" if dataclasses.is_dataclass(types[name]) else type_name(types[name])
            raise _MisfitError(_join(path, name), f"is required: it is {what}, and has no default", help)
    try:
        return config_class(**arguments)
    except (ValueError, TypeError) as error:  # from the dataclass's own __post_init__
        raise _MisfitError(path, f"is not valid: {error}") from error


def _convert_field(value: Any, hint: Any, field: dataclasses.Field[Any], path: str) -> Any:
    stated = constraints(field)
    try:
        converted = _convert(value, hint, path)
        _check_bounds(converted, stated, path)
    except _MisfitError as misfit:
        misfit.help = misfit.help or (stated["help"] if misfit.path == path else "")
        raise
    return converted


def _check_bounds(value: Any, stated: Mapping[str, Any], path: str) -> None:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_bounds(item, stated, _join(path, str(index)))
        return
    choices = stated["choices"]
    if choices is not None and value is not None and value not in choices:
        raise _MisfitError(path, f"must be one of {', '.join(map(repr, choices))}, not {_show(value)}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = stated["minimum"], stated["maximum"]
        if low is not None and not value >= low:
            raise _MisfitError(path, f"must be at least {low}, not {_show(value)}")
        if high is not None and not value <= high:
            raise _MisfitError(path, f"must be at most {high}, not {_show(value)}")


def _convert(value: Any, hint: Any, path: str) -> Any:
    """`value` as the type `hint`; a class may convert itself: `from_option(value, path)`, with a ValueError for what
    does not fit.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if hint is None or hint is NoneType:
        if value is None:
            return None
        raise _MisfitError(path, f"must be none, not {_show(value)}")
    if origin is typing.Annotated:
        return _convert(value, arguments[0], path)
    if origin is Literal:
        return _convert_literal(value, arguments, path)
    if origin in (Union, UnionType):
        return _convert_union(value, hint, arguments, path)
    if isinstance(origin or hint, type):
        return _convert_class(value, hint, origin or hint, arguments, path)
    raise PluginError(f"option {path} has the type {type_name(hint)}, which no option may have")


def _convert_class(value: Any, hint: Any, cls: type, arguments: tuple[Any, ...], path: str) -> Any:
    if cls in _SCALARS:
        return _SCALARS[cls](value, path)
    if dataclasses.is_dataclass(cls):
        return _build(cls, value, path)
    if hasattr(cls, "from_option"):
        try:
            return cls.from_option(value, path)
        except ValueError as error:
            raise _MisfitError(path, str(error)) from None
    if issubclass(cls, tuple) and arguments and arguments[-1] is not Ellipsis:
        items = _items(value, path)
        if len(items) != len(arguments):
            raise _MisfitError(path, f"must have {len(arguments)} items, not {len(items)}")
        return tuple(_convert(item, arguments[i], _join(path, str(i))) for i, item in enumerate(items))
    if issubclass(cls, Mapping):
        if not isinstance(value, Mapping):
            raise _MisfitError(path, f"must be a mapping, not {_show(value)}")
        key_type, value_type = arguments or (Any, Any)
        return {_convert(k, key_type, path): _convert(v, value_type, _join(path, str(k))) for k, v in value.items()}
    if issubclass(cls, (Sequence, set, frozenset)):
        item_type = arguments[0] if arguments else Any
        items = [_convert(item, item_type, _join(path, str(i))) for i, item in enumerate(_items(value, path))]
        return cls(items) if cls in (tuple, set, frozenset) else items
    raise PluginError(f"option {path} has the type {type_name(hint)}, which no option may have")


def _items(value: Any, path: str) -> list[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    advice = "[]" if value is None else f"[{value}]"
    raise _MisfitError(path, f"must be a list, not {_show(value)}: write {advice}")


def _convert_literal(value: Any, allowed: tuple[Any, ...], path: str) -> Any:
    for candidate in allowed:
        if type(candidate) is type(value) and candidate == value:
            return candidate
    hint = f". {suggest(value, [a for a in allowed if isinstance(a, str)])}" if isinstance(value, str) else ""
    raise _MisfitError(path, f"must be one of {', '.join(map(repr, allowed))}, not {_show(value)}{hint}")


def _convert_union(value: Any, hint: Any, members: tuple[Any, ...], path: str) -> Any:
    if value is None and NoneType in members:
        return None
    others = [member for member in members if member is not NoneType]
    if len(others) == 1:
        return _convert(value, others[0], path)
    exact = [member for member in others if isinstance(member, type) and type(value) is member]
    for member in exact + others:
        try:
            return _convert(value, member, path)
        except _MisfitError as misfit:
            if misfit.path != path or (isinstance(value, Mapping) and dataclasses.is_dataclass(member)):
                raise  # the value is of this member's shape, and one of its parts is wrong: that is the news
    raise _MisfitError(path, f"must be {type_name(hint)}, not {_show(value)}")


def _convert_bool(value: Any, path: str) -> bool:
    if isinstance(value, bool):
        return value
    raise _MisfitError(path, f"must be true or false, not {_show(value)}")


def _convert_int(value: Any, path: str) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole or (isinstance(value, float) and value.is_integer()):  # 1e6 is how people write a million
        if -(2**63) <= value < 2**63:
            return int(value)
        raise _MisfitError(path, f"must be a whole number that 64 bits can hold, not {_show(value)}")
    raise _MisfitError(path, f"must be a whole number (int), not {_show(value)}")


def _convert_float(value: Any, path: str) -> float:
    is_text = isinstance(value, str) and _NUMBER.fullmatch(value)  # YAML 1.1 takes 1e-5 for a text
    if is_text or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        if is_finite(value):
            return float(value)
        raise _MisfitError(path, f"must be a finite number (float), not {_show(value)}")
    raise _MisfitError(path, f"must be a number (float), not {_show(value)}")


def _convert_str(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    hint = f": put it in quotes, '{value}'" if isinstance(value, (int, float)) else ""
    raise _MisfitError(path, f"must be a text (str), not {_show(value)}{hint}")


def _convert_path(value: Any, path: str) -> Path:
    return value if isinstance(value, Path) else Path(_convert_str(value, path))


_SCALARS: dict[type, typing.Callable[[Any, str], Any]] = {
    bool: _convert_bool,
    int: _convert_int,
    float: _convert_float,
    str: _convert_str,
    Path: _convert_path,
}


def _show(value: Any) -> str:
    """A value for an error: short, with its type where the value alone would not tell."""
    text = repr(value)
    if len(text) > 60:
        text = f"{text[:57]}..."
    if value is None:
        return "none"
    return text if type(value) in (int, float) else f"{text} ({type(value).__name__})"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
