"""A config file as plain data, with the line that each value stands in.

For the config loader. Everything that can be wrong with the file itself is a one-line error with file and line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from rollstock.config.dialect import ConfigLoader
from rollstock.errors import ConfigError, nearest

TOO_DEEP: Final = "mappings and lists lie within each other too deeply to be read; a config needs a handful of levels"


@dataclass
class ConfigFile:
    """What a file says: `values`, and for each path in it (`rewards.0.name`) the place, `demo.yaml:12`."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


def read_config_file(path: Path) -> ConfigFile:
    """Read a YAML file. Raises ConfigError if it is missing, unreadable, no valid YAML, or no mapping, or has a key
    twice.
    """
    file = ConfigFile(str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"there is no config file {path}.{_similar(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory, not a config file.{_similar(path / 'config.yaml')}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config file {path} is no text in UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read: {error.strerror}") from None
    try:
        loader = ConfigLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{path}: the config file is empty")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}:{_line(node)}: a config is a mapping of sections (`train: ...`)")
        file.values = _Walk(loader, file).mapping(node, "", ())
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax(path, error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {TOO_DEEP}") from None
    file.origins[""] = str(path)
    return file


class _Walk:
    """Turns nodes into values, and notes the line of each."""

    def __init__(self, loader: ConfigLoader, file: ConfigFile) -> None:
        self._loader = loader
        self._file = file

    def value(self, node: yaml.Node, path: str, around: tuple[yaml.Node, ...]) -> Any:
        if node in around:
            raise ConfigError(f"{self._file.name}:{_line(node)}: {path} contains itself, through an alias")
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self.mapping(node, path, around)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self._item(item, f"{path}.{i}", (*around, node)) for i, item in enumerate(node.value)]
        return self._loader.construct_object(node, deep=True)

    def mapping(self, node: yaml.MappingNode, path: str, around: tuple[yaml.Node, ...]) -> dict[Any, Any]:
        self._refuse_duplicates(node, path)
        self._loader.flatten_mapping(node)
        values = {}
        for key_node, value_node in node.value:
            key = self._loader.construct_object(key_node, deep=True)
            if key is None or isinstance(key, (list, dict, set)):
                shown = "empty" if key is None else repr(key)
                raise ConfigError(f"{self._file.name}:{_line(key_node)}: a key must be a word, not {shown}")
            inner = f"{path}.{key}" if path else str(key)
            self._file.origins[inner] = f"{self._file.name}:{_line(key_node)}"
            values[key] = self.value(value_node, inner, (*around, node))
        return values

    def _item(self, node: yaml.Node, path: str, around: tuple[yaml.Node, ...]) -> Any:
        self._file.origins[path] = f"{self._file.name}:{_line(node)}"
        return self.value(node, path, around)

    def _refuse_duplicates(self, node: yaml.MappingNode, path: str) -> None:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    inner = f"{path}.{key_node.value}" if path else key_node.value
                    where = f"{self._file.name}:{_line(key_node)}"
                    raise ConfigError(
                        f"{where}: {inner} is there already, in line {seen[key_node.value]}: remove one of them"
                    )
                seen[key_node.value] = _line(key_node)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _syntax(path: Path, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    parts = [part for part in (error.context, error.problem) if part]
    hint = " (indent with spaces, not tabs)" if "\\t" in str(error.problem) else ""
    return f"{where}: not valid YAML: {', '.join(parts)}{hint}"


def _similar(path: Path) -> str:
    """A question about the config file that may have been meant: one of a similar name nearby, or the only ones that
    are there.
    """
    folder = path.parent if path.parent.is_dir() else Path()
    known = sorted(found.name for pattern in ("*.yaml", "*.yml") for found in folder.glob(pattern))
    near = nearest(path.name, known) or nearest(f"{path.name}.yaml", known)
    if near:
        return f" Did you mean {folder / near[0]}?"
    return f" In {folder.resolve()} there are: {', '.join(known)}." if known else ""
