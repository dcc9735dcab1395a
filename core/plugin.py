"""The base class of every plugin, and the number of the contract between plugins and the core.

For plugin authors, by way of the interfaces (`Algorithm`, `Backend`, ...), which all derive from `Plugin`. Finding,
checking and making plugins is left to `rollstock.manager`.
"""

from __future__ import annotations

import itertools
from abc import ABC
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, get_args, get_origin

C = TypeVar("C")
"""The dataclass that holds a plugin's options."""

PLUGIN_API: Final = 1
"""The plugin API of this version. It grows by one with every change that could break a plugin."""

API_CONSTANT: Final = "ROLLSTOCK_PLUGIN_API"
"""The name under which a plugin's module may state the API that it was written for."""


@dataclass(kw_only=True)
class NoOptions:
    """The config of a plugin that has no options: what a plugin class that gives none is taken to mean."""


class Plugin(ABC, Generic[C]):
    """One named piece of a run, made from its options: `X(config)`.

    A kind's interface is `class Algorithm(Plugin[C])`, a plugin `class GRPO(Algorithm[GRPOConfig])`, where `GRPOConfig`
    is a keyword-only dataclass of `rollstock.option` fields. Without a config, all options have their defaults;
    TypeError if one of them has none.
    """

    plugin_name: str = ""
    """The name under which it was chosen (`grpo`), set by the manager; the class's name where no manager was
    involved.
    """

    def __init__(self, config: C | None = None) -> None:
        if config is None:
            config = type(self).config_class()()
        self.config: C = config
        if not self.plugin_name:
            self.plugin_name = type(self).__name__

    @classmethod
    def config_class(cls) -> type[Any]:
        """The dataclass of the options: the argument in the first base that binds `C`, `NoOptions` if none does."""
        return _binding(cls) or NoOptions

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"


def distinct_names(names: Iterable[str]) -> list[str]:
    """Names as they are, but the second use of one is `name_2`: a config may list one plugin with two settings."""
    result: list[str] = []
    for name in names:
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        result.append(next(candidate for candidate in candidates if candidate not in result))
    return result


def _binding(cls: type) -> type[Any] | None:
    """The class that `cls` or one of its bases gives for `C`, looked up in the order in which methods are."""
    for base in cls.__mro__:
        for parent in base.__dict__.get("__orig_bases__", ()):
            origin = get_origin(parent)
            if isinstance(origin, type) and issubclass(origin, Plugin):
                arguments = [argument for argument in get_args(parent) if isinstance(argument, type)]
                if arguments:
                    return arguments[0]
    return None
