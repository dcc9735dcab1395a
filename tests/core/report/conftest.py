"""The files of a run, written as the loop and its trackers do, for tests of what reads them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

CONFIG = {
    "model": {"path": "/models/Tiny-Model"},
    "algorithm": {"name": "grpo", "group_size": 8},
    "environment": {"name": "arithmetic"},
    "backend": {"name": "torch"},
    "device": {"name": "cpu"},
    "trackers": [{"name": "wandb", "api_key": "TOPSECRET"}],
    "train": {"steps": 20},
}


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """A function that makes a run directory with what it is given."""
    return lambda **content: _write(tmp_path / "run", **content)


def _write(
    root: Path,
    *,
    metrics: Mapping[int, Mapping[str, float]] | None = None,
    evaluations: Mapping[int, Mapping[str, float]] | None = None,
    rollouts: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
    config: Mapping[str, Any] = CONFIG,
    manifest: Mapping[str, Any] | None = None,
) -> Path:
    """Make a run directory with what is given."""
    (root / "rollouts").mkdir(parents=True)
    (root / "config.yaml").write_text(yaml.safe_dump(dict(config)))
    (root / "manifest.json").write_text(json.dumps(manifest or {"created": "2026-01-02T03:04:05Z"}))
    rows: list[dict[str, Any]] = [{"step": step, "evaluation": values} for step, values in (evaluations or {}).items()]
    rows += [{"step": step, "metrics": values} for step, values in (metrics or {}).items()]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, samples in (rollouts or {}).items():
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (root / "rollouts" / f"step-{step:06d}.jsonl").write_text(lines)
    return root


@pytest.fixture
def sample() -> Callable[..., dict[str, Any]]:
    """A function that makes a row of a rollouts file with a given reward."""
    return _sample


def _sample(reward: float | None, **changes: Any) -> dict[str, Any]:
    """A row of a rollouts file."""
    row = {
        "step": 1,
        "group": 0,
        "task_id": "t",
        "prompt": "What is 1 + 1?",
        "response": "2",
        "reward": reward,
        "rewards": {"environment": reward},
        "finish_reason": "stop",
        "num_tokens": 1,
        "advantage": 0.5,
    }
    return {**row, **changes}
