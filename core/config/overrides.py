"""Overrides on the command line, `train.steps=20`: parsed, and put over the values of the config file.

For the config loader. A value is YAML (`trackers=[console]`, `train.seed=3`, `run.name=null`); a path goes into lists
by number (`rewards.0.weight=2`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollstock.config.dialect import parse_value
from rollstock.config.file import TOO_DEEP
from rollstock.config.sections import SHORT, named, section_kind
from rollstock.errors import ConfigError

OVERRIDE: Final = "override"
_PATH = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


@dataclass(frozen=True)
class Override:
    """One `path=value`."""

    path: str
    value: Any


def parse_override(text: str) -> Override:
    """Raises ConfigError for a text that is no `path=value`, or whose value is not valid YAML."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not _PATH.fullmatch(path):
        raise ConfigError(f"{text!r} is no override: write path=value, such as train.steps=20")
    if not value.strip():
        raise ConfigError(
            f"the override {text!r} has no value: write {path}=null for none, or {path}=\"''\" for an empty text"
        )
    try:
        return Override(path, parse_value(value))
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"the value of the override {text!r} is not valid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"the override {path}: {TOO_DEEP}") from None


def apply_overrides(config: DictConfig, origins: dict[str, str], overrides: Sequence[str]) -> None:
    """Put the overrides over `config`, in their order, and note them in `origins`.

    A value replaces what was there. A plugin's bare name replaces a whole section, because the options of the plugin
    before it would mean nothing to the new one; the same name leaves them. The short form of a section of the core's is
    one option of it. Raises ConfigError for a path that leads
    nowhere.
    """
    for text in overrides:
        override = parse_override(text)
        if isinstance(override.value, str) and override.path in SHORT:
            override = Override(f"{override.path}.{SHORT[override.path]}", override.value)
        _check_path(config, override.path, text)
        value = override.value
        kind, is_list = section_kind(override.path)
        if kind is not None:
            current = OmegaConf.select(config, override.path, throw_on_missing=False)
            if isinstance(value, str) and isinstance(current, DictConfig) and current.get("name") == value:
                _note(origins, f"{override.path}.name", value)
                continue
            if not is_list:
                value = named(value)
            elif isinstance(value, list):
                value = [named(item) for item in value]
        try:
            OmegaConf.update(config, override.path, value, merge=False, force_add=True)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"the override {text!r} cannot be used: {reason}") from None
        _note(origins, override.path, value)


def _check_path(config: DictConfig, path: str, text: str) -> None:
    """Refuse a path through a list by anything but the number of an item, or through a value that holds nothing."""
    node: Any = OmegaConf.to_container(config, resolve=False)
    parts = path.split(".")
    for depth, part in enumerate(parts):
        before = ".".join(parts[:depth])
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                valid = f"0 to {len(node) - 1}" if node else "none, it is empty"
                raise ConfigError(
                    f"override {text!r}: {before} is a list, and its items are numbered {valid}, not {part!r}"
                )
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node.get(part)
        elif node is not None:
            raise ConfigError(f"override {text!r}: {before} is {node!r}, and has no options")


def _note(origins: dict[str, str], path: str, value: Any) -> None:
    """Everything at and below `path` is the override's now."""
    for known in [known for known in origins if f"{known}.".startswith(f"{path}.")]:
        del origins[known]
    origins[path] = OVERRIDE
    around = path.rpartition(".")[0]
    while around and around not in origins:  # what had no place in the file is there because of this
        origins[around] = OVERRIDE
        around = around.rpartition(".")[0]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _note(origins, f"{path}.{key}", item)
