"""Whole runs that are over in seconds, for tests of plugins: a real model, real workers, a directory of their own.

For the extension kit, the pytest fixtures and the tests of plugin authors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.config.file import ConfigFile
from rollstock.config.load import config_from_values
from rollstock.defaults import EXAMPLE_RUN

if TYPE_CHECKING:
    from rollstock.launch import Outcome
    from rollstock.schema import RunConfig


def tiny_config(directory: Path, sections: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a tiny run in `directory`: sums of two digits on a model of 90 thousand weights, two steps.

    sections: of the config, each in place of the example's (`{"algorithm": {"name": "mine"}}`); overrides:
    `path=value`, put over them. Raises ConfigError.
    """
    values = copy.deepcopy(EXAMPLE_RUN)
    values["train"] |= {"steps": 2, "prompts_per_step": 4}
    values["evaluation"] = {"prompts": 4, "samples": 0}
    values["run"] = {"name": "tiny", "directory": str(directory)}
    values |= copy.deepcopy(dict(sections or {}))
    return config_from_values(ConfigFile("tiny", values), overrides)


def tiny_run(directory: Path, sections: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> Outcome:
    """Train as `tiny_config` says. Raises UserError and RunError as `rollstock train` does."""
    from rollstock.launch import train

    return train(tiny_config(directory, sections, overrides))


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, steps and evaluations in order."""
    import json

    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
