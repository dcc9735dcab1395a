"""A run's files, read with patience: a line that is half-written or damaged costs that line and no more.

For the report and the export card. Rows are what the `jsonl` tracker writes; a step that was recorded twice (a resume
went over it again) counts as it was recorded last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollstock.checkpoint.errors import CheckpointCorruptError
from rollstock.checkpoint.folder import Manifest, read_manifest
from rollstock.lockfile import LockFile
from rollstock.rundir import RunDirectory

Row = Mapping[str, float]


@dataclass
class RunFiles:
    """What was found in a run directory.

    metrics, evaluations: numbers by step, steps in order; NaN and infinities are kept as they are. unreadable: lines
    that could not be used, by file name.
    """

    directory: RunDirectory
    metrics: dict[int, Row] = field(default_factory=dict)
    evaluations: dict[int, Row] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[Manifest] = field(default_factory=list)
    damaged_checkpoints: list[str] = field(default_factory=list)
    unreadable: dict[str, int] = field(default_factory=dict)
    running: bool = False

    @property
    def last_step(self) -> int:
        """The last step that has metrics; 0 before the first."""
        return max(self.metrics, default=0)

    @property
    def planned_steps(self) -> int | None:
        """How many steps the config asks for."""
        train = self.config.get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        return steps if isinstance(steps, int) else None

    @property
    def status(self) -> str:
        """finished, running, stopped, or empty."""
        if self.planned_steps is not None and self.last_step >= self.planned_steps:
            return "finished"
        if self.running:
            return "running"
        return "stopped" if self.metrics else "empty"

    def name_of(self, section: str) -> str:
        """The plugin chosen in a config section, "" if none is named."""
        value = self.config.get(section)
        name = value.get("name") if isinstance(value, dict) else value
        return name if isinstance(name, str) else ""

    def rollout_steps(self) -> list[int]:
        """Steps with a file of trajectories, in order."""
        names = (path.stem.removeprefix("step-") for path in self.directory.rollouts.glob("step-*.jsonl"))
        return sorted(int(name) for name in names if name.isdigit())

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """The trajectories recorded for `step`; damaged lines are left out and counted."""
        return list(self._objects(self.directory.rollouts / f"step-{step:06d}.jsonl"))

    def _objects(self, path: Path) -> Iterator[dict[str, Any]]:
        try:
            lines = path.open(encoding="utf-8", errors="replace")
        except OSError:
            return
        with lines:
            for line in lines:
                try:
                    value = json.loads(line)
                except ValueError:
                    value = None
                if isinstance(value, dict):
                    yield value
                elif line.strip():
                    self.unreadable[path.name] = self.unreadable.get(path.name, 0) + 1


def read_run(path: Path) -> RunFiles:
    """Read all that is small: metrics, config, manifest, checkpoints' manifests. Raises `UserError` for no run."""
    directory = RunDirectory.open(path)
    run = RunFiles(directory)
    for row in run._objects(directory.metrics):
        step = row.get("step")
        if not isinstance(step, int):
            run.unreadable[directory.metrics.name] = run.unreadable.get(directory.metrics.name, 0) + 1
            continue
        for key, into in (("metrics", run.metrics), ("evaluation", run.evaluations)):
            if isinstance(row.get(key), dict):
                into[step] = _numbers(row[key])
    run.metrics = dict(sorted(run.metrics.items()))
    run.evaluations = dict(sorted(run.evaluations.items()))
    run.config = _mapping(directory.config, yaml.safe_load, run)
    run.manifest = _mapping(directory.manifest, json.loads, run)
    for step in directory.checkpoint_steps():
        folder = directory.checkpoints / f"step-{step:06d}"
        try:
            run.checkpoints.append(read_manifest(folder))
        except CheckpointCorruptError as error:
            run.damaged_checkpoints.append(str(error))
    run.running = LockFile(directory.path / ".lock", "").is_held_by_anyone()
    return run


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}


def _mapping(path: Path, parse: Any, run: RunFiles) -> dict[str, Any]:
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        value = None
    if isinstance(value, dict):
        return value
    if path.exists():
        run.unreadable[path.name] = 1
    return {}


def finite(values: Iterator[float] | list[float]) -> list[float]:
    """Those of `values` that are numbers in the ordinary sense."""
    return [value for value in values if math.isfinite(value)]
