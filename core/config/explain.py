"""A config explained: as YAML, with a comment behind each value that says where it came from.

For `rollstock config`. The text is itself a config.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from rollstock.config.dialect import ConfigLoader
from rollstock.config.load import sections
from rollstock.config.write import config_text
from rollstock.schema import RunConfig

_COLUMN = 56  # where the comments begin, if the line leaves room


def origins_of(config: RunConfig) -> dict[str, str]:
    """Where each single value came from, by path: `demo.yaml:12`, `override` or `default`."""
    known = dict(config.origins)
    for place, section in sections(config):
        known |= {f"{place}.{path}" if path else place: origin for path, origin in section.origins.items()}
    return {path: known.get(path, "default") for path, _ in _leaves(config.to_dict(), "")}


def annotated(config: RunConfig) -> str:
    """The config as YAML text with the origin of each value."""
    text = config_text(config)
    origins = origins_of(config)
    lines = text.splitlines()
    root = ConfigLoader(text).get_single_node()
    for path, node in _leaf_nodes(root, ""):
        line = node.end_mark.line
        lines[line] = f"{lines[line]:<{_COLUMN}}  # {origins.get(path, 'default')}"
    return "\n".join(lines) + "\n"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Values that hold no others; an empty list or mapping counts as one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield path, value
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _leaf_nodes(node: yaml.Node | None, path: str) -> Iterator[tuple[str, yaml.Node]]:
    """The nodes of `_leaves`, with the same paths."""
    if isinstance(node, yaml.MappingNode) and node.value:
        for key, value in node.value:
            yield from _leaf_nodes(value, f"{path}.{key.value}" if path else key.value)
    elif isinstance(node, yaml.SequenceNode) and node.value:
        for index, value in enumerate(node.value):
            yield from _leaf_nodes(value, f"{path}.{index}")
    elif node is not None:
        yield path, node
