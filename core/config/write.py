"""A config written to a file, from which `load_run_config` reads it back as it was."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollstock.config.dialect import dump
from rollstock.errors import ConfigError
from rollstock.schema import RunConfig
from rollstock.secrets import MASK, is_secret_name, mask_text

_INTERPOLATION = re.compile(r"(\\*)\$\{")  # a backslash before it escapes it, two are one backslash and do not


def write_config(config: RunConfig, path: Path | str) -> None:
    """Write a config as YAML, without its secrets: those that an environment variable holds are named by it. Raises
    OSError."""
    Path(path).write_text(config_text(config), encoding="utf-8")


def config_text(config: RunConfig) -> str:
    """A config as YAML text, without its secrets."""
    return dump(_escape(config.to_dict()))


def refuse_concealed(config: RunConfig, path: Path | str) -> None:
    """Raise ConfigError if a config that was read back from `path` lacks a secret that it was written without."""
    missing = _find_concealed(config.to_dict())
    if missing is not None:
        raise ConfigError(
            f"{path}: {missing} was a secret, which is not kept: put the name of an environment variable that holds it "
            "there, as ${oc.env:NAME}; a run that is begun so can be resumed as it is"
        )


def _find_concealed(value: Any, path: str = "") -> str | None:
    """The path of the first secret in plain data that was not written down; None if there is none."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    elif isinstance(value, str) and _is_concealed(value):
        return path
    found = (_find_concealed(inner, f"{path}.{key}" if path else str(key)) for key, inner in items)
    return next((place for place in found if place is not None), None)


def _escape(value: Any, name: str = "") -> Any:
    """Keep texts that look like interpolations from being resolved when the file is read: they have been resolved
    already. Only a secret is one again."""
    if isinstance(value, dict):
        return {key: _escape(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item, name) for item in value]
    if not isinstance(value, str):
        return value
    if value and is_secret_name(name):
        return conceal(value)
    masked = mask_text(value)  # a key within a longer text may be no key, and a run without it another run
    return masked if _is_concealed(masked) else _escape_text(value)


def _is_concealed(text: str) -> bool:
    return text == MASK or f"://{MASK}@" in text


def conceal(secret: str) -> str:
    """The environment variable that holds a secret, as a config names it; a mask where none does."""
    found = next((name for name, value in sorted(os.environ.items()) if value == secret), None)
    return MASK if found is None else f"${{oc.env:{found}}}"


def _escape_text(text: str) -> str:
    return _INTERPOLATION.sub(r"\1\1\\${", text)
