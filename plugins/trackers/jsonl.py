"""Metrics and trajectories as JSON lines in the run's directory.

The record that `rollstock report` and `rollstock resume` rely on: `metrics.jsonl` (one object a step or evaluation)
and `rollouts/step-NNNNNN.jsonl` (one object a trajectory). After a resume the files are what an uninterrupted run
would have written: whatever came after the checkpoint is cut off and written again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rollstock import RunError, RunInfo, Tracker, hookimpl, option

logger = logging.getLogger(__name__)
_STEP_FILE = re.compile(r"step-(\d+)\.jsonl(\.part)?")


@dataclass(kw_only=True)
class JsonlConfig:
    """Options of the `jsonl` tracker."""

    rollouts: bool = option(True, "write trajectories too, not only metrics")
    rollouts_every: int = option(1, "write the trajectories of every n-th step", minimum=1, maximum=1_000_000_000)


class JsonlTracker(Tracker[JsonlConfig]):
    """Lines are readable by others as soon as they are written, and on disk when a checkpoint refers to them.

    A number that is not finite, for which JSON has no spelling, is written as null.
    """

    _file: BinaryIO | None = None

    def start(self, run: RunInfo, state: Mapping[str, Any]) -> None:
        """Open `metrics.jsonl`: empty at first, cut to the checkpoint's length after a resume."""
        self._path = run.directory / "metrics.jsonl"
        self._folder = run.directory / "rollouts"
        self._folder.mkdir(parents=True, exist_ok=True)
        resumed_at = 0 if run.resumed_at is None else run.resumed_at
        length = 0 if run.resumed_at is None else self._length_to_keep(state.get("position"), resumed_at)
        self._file = self._path.open("r+b" if self._path.exists() else "w+b")
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)
        for path in self._folder.iterdir():
            match = _STEP_FILE.fullmatch(path.name)
            if match and (match[2] or int(match[1]) > resumed_at):
                path.unlink()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line: `{"step": 3, "metrics": {...}}`."""
        self._write({"step": step, "metrics": dict(metrics)})

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line: `{"step": 3, "evaluation": {...}}`."""
        self._write({"step": step, "evaluation": dict(metrics)})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """One file, whole or not at all."""
        if not self.config.rollouts or step % self.config.rollouts_every:
            return
        path = self._folder / f"step-{step:06d}.jsonl"
        part = path.with_suffix(".jsonl.part")
        part.write_bytes(b"".join(line(row) for row in rows))
        part.replace(path)

    def state(self) -> dict[str, Any]:
        """The length of `metrics.jsonl`, all of it on disk."""
        file = self._opened()
        os.fsync(file.fileno())
        return {"position": file.tell()}

    def finish(self, status: str) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Mapping[str, Any]) -> None:
        file = self._opened()
        file.write(line(record))
        file.flush()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise RunError("the jsonl tracker was used before `start` or after `finish`")
        return self._file

    def _length_to_keep(self, position: object, resumed_at: int) -> int:
        """Bytes of the file that belong to steps up to the checkpoint's."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if isinstance(position, int) and position <= size:
            return position
        # The tracker is new in this config, or the file was changed: go by the steps that the lines name.
        if isinstance(position, int):
            logger.warning("%s is shorter than at the checkpoint (%d bytes, then %d)", self._path, size, position)
        return length_up_to(self._path, resumed_at) if size else 0


def line(record: Mapping[str, Any]) -> bytes:
    """A record as one line of JSON."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(without_nan(record), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"


def without_nan(value: Any) -> Any:
    """A copy of plain data with None for every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def length_up_to(path: Path, step: int) -> int:
    """How many bytes of a metrics file are whole lines of steps up to `step`, before the first other line."""
    length = 0
    with path.open("rb") as file:
        for text in file:
            try:
                record = json.loads(text)
            except ValueError:
                break
            if not text.endswith(b"\n") or not isinstance(record, dict) or record.get("step", step + 1) > step:
                break
            length += len(text)
    return length


@hookimpl
def rollstock_tracker() -> type[Tracker[Any]]:
    """The class of this plugin."""
    return JsonlTracker
