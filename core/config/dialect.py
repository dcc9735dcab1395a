"""The YAML that configs are written in: YAML 1.2's plain values, by way of PyYAML.

PyYAML's own dialect, 1.1, takes `1e-5` for a text, `off` for a bool and `1:30` for 90; OmegaConf's loader mends the
first of these. Reading and writing share one resolver, so that what is written is read back as it was.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.emitter import Emitter
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.representer import SafeRepresenter
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner
from yaml.serializer import Serializer

MAX_VALUES = 100_000

_INT = r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
_SPECIAL = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_PLAIN_VALUES = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", f"{_FLOAT}|{_SPECIAL}", "-+0123456789."),
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
)


class _Resolver(BaseResolver):
    """Which plain scalars are something else than a text."""


for _tag, _pattern, _first in _PLAIN_VALUES:
    _Resolver.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), [*_first, ""])


class ConfigLoader(Reader, Scanner, Parser, Composer, SafeConstructor, _Resolver):
    """Reads a config; nothing in a file can make it run code."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        _Resolver.__init__(self)

    def get_single_node(self) -> yaml.Node | None:
        """The document's root. Raises YAMLError where aliases of aliases would make a huge tree of a small file."""
        root: yaml.Node | None = super().get_single_node()
        if root is not None and _num_values(root, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"with its aliases written out it has more than {MAX_VALUES} values")
        return root

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node; a text that its tag cannot be made from (`!!int x`) is an error with a place as well."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"the value cannot be read as {kind} ({error})"
            raise ConstructorError(None, None, problem, node.start_mark) from None


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for; one that contains itself is counted once, and refused elsewhere."""
    if id(node) not in known:
        known[id(node)] = 1
        items = node.value if isinstance(node, yaml.CollectionNode) else []
        children = [child for item in items for child in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] += sum(_num_values(child, known) for child in children)
    return known[id(node)]


class _ConfigDumper(Emitter, Serializer, SafeRepresenter, _Resolver):
    def __init__(self, stream: Any, **settings: Any) -> None:
        indent, width, unicode = settings["indent"], settings["width"], settings["allow_unicode"]
        Emitter.__init__(self, stream, indent=indent, width=width, allow_unicode=unicode)
        Serializer.__init__(self)
        SafeRepresenter.__init__(
            self, default_flow_style=settings["default_flow_style"], sort_keys=settings["sort_keys"]
        )
        _Resolver.__init__(self)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_OLD_DIALECT: Any = yaml.SafeLoader("")


def _represent_text(dumper: _ConfigDumper, text: str) -> yaml.ScalarNode:
    """Quotes around whatever a reader of YAML 1.1 would not take for a text, or not for the same one."""
    if any(mark in text for mark in "\x85\u2028\u2029\ufeff"):  # line breaks that PyYAML's other styles do not keep
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
    old = _OLD_DIALECT.resolve(yaml.ScalarNode, text, (True, False))
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if old.endswith(":str") else "'")


_ConfigDumper.add_representer(str, _represent_text)


def dump(data: Any) -> str:
    """Plain data as YAML text that `ConfigLoader` reads back as it was."""
    text: str = yaml.dump(
        data, Dumper=_ConfigDumper, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=False
    )
    return text


def parse_value(text: str) -> Any:
    """The value of an override, `0.5`, `[console]`, `null`. Raises yaml.YAMLError."""
    loader = ConfigLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
