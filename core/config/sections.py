"""Which paths of a config are sections of plugins, and the short form of a section: a bare name."""

from __future__ import annotations

from typing import Any

from rollstock.kinds import KINDS, Kind

_BY_SECTION = {kind.section: kind for kind in KINDS.values() if kind.section}
SHORT = {"pipeline": "mode"}
"""The core's own sections that have a short form, and the option that a bare text then means."""


def section_kind(path: str) -> tuple[Kind | None, bool]:
    """The kind whose section `path` is, and whether it is a whole list of sections (`rewards`, but not `rewards.0`)."""
    head, _, rest = path.partition(".")
    kind = _BY_SECTION.get(head)
    if kind is None or (rest and not (kind.many and rest.isdigit())):
        return None, False
    return kind, kind.many and not rest


def named(value: Any) -> Any:
    """`{name: value}` for a bare name; anything else as it is."""
    return {"name": value} if isinstance(value, str) else value


def spell_out(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Replace every bare name in a file's values by a mapping, and note the origin of its `name`."""
    for section, option in SHORT.items():
        if isinstance(values.get(section), str):
            values[section] = {option: values[section]}
            if section in origins:
                origins[f"{section}.{option}"] = origins[section]
    for section, kind in _BY_SECTION.items():
        if section not in values:
            continue
        if kind.many and isinstance(values[section], list):
            for index, item in enumerate(values[section]):
                _spell_out_one(item, f"{section}.{index}", origins)
            values[section] = [named(item) for item in values[section]]
        elif not kind.many:
            _spell_out_one(values[section], section, origins)
            values[section] = named(values[section])


def _spell_out_one(value: Any, path: str, origins: dict[str, str]) -> None:
    if isinstance(value, str) and path in origins:
        origins[f"{path}.name"] = origins[path]
