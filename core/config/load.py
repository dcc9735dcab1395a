"""From a file and overrides to a checked config: defaults, then the file, then the overrides, merged by OmegaConf.

For the command line and for programs that start runs. Interpolations (`${train.seed}`, `${oc.env:HOME}`) are
OmegaConf's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollstock.config.file import TOO_DEEP, ConfigFile, read_config_file
from rollstock.config.overrides import OVERRIDE, apply_overrides
from rollstock.config.sections import spell_out
from rollstock.conversion import build_config, to_plain
from rollstock.defaults import DEFAULT_PLUGINS
from rollstock.errors import ConfigError
from rollstock.kinds import KINDS
from rollstock.schema import RunConfig
from rollstock.section import Section


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file, with `path=value` overrides put over it.

    The core's sections are checked here; those of plugins when `complete_config` or the run asks the plugins. Raises
    ConfigError, with file and line where there is one, for whatever is wrong.
    """
    path = Path(path)
    config = config_from_values(read_config_file(path), overrides)
    config.run.name = config.run.name or path.stem
    config.run.directory = config.run.directory or str(Path("runs", config.run.name))
    return config


def load_run_config(path: Path | str) -> RunConfig:
    """Read the `config.yaml` of a run directory, which `write_config` wrote. Raises ConfigError as `load_config`
    does.
    """
    return config_from_values(read_config_file(Path(path)), ())


def config_from_values(file: ConfigFile, overrides: Sequence[str] = ()) -> RunConfig:
    """Merge what a file says with the defaults and the overrides, and check the result."""
    origins = dict(file.origins)
    values = copy.deepcopy(file.values)
    spell_out(values, origins)
    defaults = _defaults()
    _make_room(defaults, values)
    try:
        merged = _resolve(defaults, values, origins, overrides, file.name)
        config = build_config(RunConfig, Section(merged, origins=origins), place="")
    except RecursionError:
        raise ConfigError(f"{file.name}: {TOO_DEEP}") from None
    config.origins = {key: origin for key, origin in origins.items() if key}
    if not config.extensions:  # which may bring roles; they are asked when the run is put together
        config.check_roles(())
    for place, section in sections(config):
        section.place = place
        section.origins = {
            key.removeprefix(place).removeprefix("."): origin
            for key, origin in origins.items()
            if f"{key}.".startswith(f"{place}.")
        }
    return config


def _make_room(defaults: dict[str, Any], values: Mapping[Any, Any]) -> None:
    """Take out the defaults where the file has a value of another shape (none, or a mistake): it cannot be merged."""
    for name in defaults.keys() & values.keys():
        if not isinstance(values[name], Mapping) or not isinstance(defaults[name], dict):
            del defaults[name]
        else:
            _make_room(defaults[name], values[name])


def _defaults() -> dict[str, Any]:
    """The config of a file that says nothing, as plain data, so that interpolations may refer to defaults as well."""
    fields = dataclasses.fields(RunConfig)
    own = {field.name: field.default_factory() for field in fields if field.init and callable(field.default_factory)}
    plugins = copy.deepcopy(DEFAULT_PLUGINS)
    spell_out(plugins, {})
    return {**to_plain(own), **plugins}


def _resolve(
    defaults: dict[str, Any], values: dict[str, Any], origins: dict[str, str], overrides: Sequence[str], name: str
) -> dict[str, Any]:
    try:
        merged = OmegaConf.merge(OmegaConf.create(defaults), OmegaConf.create(values))
        assert isinstance(merged, DictConfig)
        apply_overrides(merged, origins, overrides)
        # a merge takes an open value of the file for none at all, so the file is asked as well
        open_values = [key for key in _left_open(values, "") if origins.get(key) != OVERRIDE]
        open_values += _left_open(OmegaConf.to_container(merged, resolve=False), "")
        if open_values:
            where = origins.get(open_values[0], name)
            raise ConfigError(f"{where}: {open_values[0]} is left open (???): give it a value")
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        path = getattr(error, "full_key", None) or ""
        where = origins.get(path, name)
        raise ConfigError(f"{where}: {path or 'the config'}: {_one_line(error)}") from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _left_open(value: Any, path: str) -> list[str]:
    """The paths of the values that are `???`."""
    if isinstance(value, Mapping):
        return [
            key for name, item in value.items() for key in _left_open(item, f"{path}.{name}" if path else str(name))
        ]
    if isinstance(value, list):
        return [key for index, item in enumerate(value) for key in _left_open(item, f"{path}.{index}")]
    return [path] if value == "???" else []


def _one_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def sections(config: RunConfig) -> Iterator[tuple[str, Section]]:
    """Every plugin section of a config with its path, `rewards.0`."""
    for kind in KINDS.values():
        if kind.section:
            found = getattr(config, kind.section)
            for index, section in enumerate(found if kind.many else [found] if found else []):
                yield (f"{kind.section}.{index}" if kind.many else kind.section), section
