"""One plugin's section of a config: a plain mapping that remembers where in which file it stood.

For the config loader, which makes sections, and for the plugin manager, whose errors then name `demo.yaml:12:
algorithm.clip`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar


class Section(dict[str, Any]):
    """`{name: ..., <options>}`; `place` is its path in the config (`rewards.0`), `origins` says where each value came
    from.

    `origins` has option paths relative to the section; the empty path stands for the section itself.
    """

    option_type: ClassVar[str] = "a plugin: {name: ..., <its options>}"

    def __init__(self, values: Mapping[str, Any], *, place: str = "", origins: Mapping[str, str] | None = None) -> None:
        super().__init__(values)
        self.place = place
        self.origins: dict[str, str] = dict(origins or {})

    @property
    def name(self) -> str:
        """The plugin's name."""
        return str(self["name"])

    @classmethod
    def from_option(cls, value: Any, place: str) -> Section:
        """Read a section as a user writes it: a bare name, or a mapping with a `name`. Raises ValueError otherwise."""
        if isinstance(value, str) and value:
            return cls({"name": value}, place=place)
        if not isinstance(value, Mapping):
            shown = "none" if value is None else repr(value)
            raise ValueError(f"must be a plugin's name or a mapping with one, not {shown}")
        if not isinstance(value.get("name"), str) or not value["name"]:
            raise ValueError(f"must say which plugin it means: {{name: ..., <its options>}}, not {dict(value)!r}")
        return cls(value, place=place, origins=value.origins if isinstance(value, Section) else None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), dict(self), self.place, self.origins)


LARGEST_WEIGHT = 1e9


class RewardSection(Section):
    """The section of a reward, which has a `weight` besides: its factor in the sum of rewards, 1 unless it is given."""

    @classmethod
    def from_option(cls, value: Any, place: str) -> Section:
        """As `Section.from_option`; ValueError also for a weight that is no number, or beyond `LARGEST_WEIGHT`."""
        section = super().from_option(value, place)
        weight = section.setdefault("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not is_finite(weight):
            raise ValueError(f"has a weight that is no number: {'none' if weight is None else repr(weight)}")
        if abs(weight) > LARGEST_WEIGHT:
            raise ValueError(f"has a weight beyond {LARGEST_WEIGHT:g}: {weight!r}")
        section["weight"] = float(weight)
        return section

    @property
    def weight(self) -> float:
        """Its factor in the sum of rewards."""
        return float(self["weight"])


def is_finite(number: float | str) -> bool:
    """Whether a number, or the text of one, is a finite float; a whole number that no float can hold is not."""
    try:
        return math.isfinite(float(number))
    except OverflowError:
        return False


def _rebuild(cls: type[Section], values: dict[str, Any], place: str, origins: dict[str, str]) -> Section:
    return cls(values, place=place, origins=origins)


def place_of(values: Mapping[str, Any], otherwise: str = "") -> str:
    """Where `values` stood in the config; `otherwise` for a plain mapping."""
    return getattr(values, "place", "") or otherwise


def origin_of(values: Mapping[str, Any], path: str) -> str:
    """`demo.yaml:12` for the option at `path`, or for the nearest enclosing one that is known; empty if none is, or a
    default.
    """
    origins: Mapping[str, str] = getattr(values, "origins", {})
    while True:
        if path in origins:
            return "" if origins[path] == "default" else origins[path]
        if not path:
            return ""
        path = path.rpartition(".")[0]
