"""A config written to a file, from which `load_run_config` reads it back as it was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rollstock.config.dialect import dump
from rollstock.schema import RunConfig

_INTERPOLATION = re.compile(r"(\\*)\$\{")  # a backslash before it escapes it, two are one backslash and do not


def write_config(config: RunConfig, path: Path | str) -> None:
    """Write a config as YAML. Raises OSError."""
    Path(path).write_text(config_text(config), encoding="utf-8")


def config_text(config: RunConfig) -> str:
    """A config as YAML text."""
    return dump(_escape(config.to_dict()))


def _escape(value: Any) -> Any:
    """Keep texts that look like interpolations from being resolved when the file is read: they have been resolved
    already.
    """
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return _escape_text(value) if isinstance(value, str) else value


def _escape_text(text: str) -> str:
    return _INTERPOLATION.sub(r"\1\1\\${", text)
