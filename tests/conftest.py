"""What several folders of tests share."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile(
    "rollstock", deadline=None
)  # how long an example takes says more of the machine than of the code
settings.load_profile("rollstock")

# Ray reads these when a process first imports it, which is when the executor sets them. Whichever test comes first, all
# of them and the nodes that they start have the same ones.
os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="token")


@pytest.fixture(autouse=True)
def keep_environment() -> Iterator[None]:
    """Put environment variables back: the command line sets some for its process, which here goes on."""
    before = dict(os.environ)
    yield
    before.pop("PYTEST_CURRENT_TEST", None)
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def cases() -> dict[str, Any]:
    """The known-right numbers of tests/cases, by subject."""
    return json.loads((Path(__file__).parent / "cases" / "numbers.json").read_text())


SMALL_RUN: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32,
        },
        "tokenizer": {"characters": "0123456789+="},
    },
    "algorithm": {"name": "grpo", "group_size": 2},
    "backend": {"name": "torch", "learning_rate": 1e-2},
    "sampling": {"max_new_tokens": 2},
    "train": {"steps": 3, "prompts_per_step": 2},
    "evaluation": {"prompts": 2, "samples": 0},
    "reward_limits": {"workers": 1},
}
"""Sections of a run that takes as little as a run can."""


@pytest.fixture(scope="session")
def small_run() -> Callable[..., Any]:
    """The config of a small run: `small_run(directory, "train.steps=5", extensions=["mine"])`."""
    from rollstock.testing import tiny_config

    def make(directory: Path, *overrides: str, **sections: Any) -> Any:
        return tiny_config(directory, {**SMALL_RUN, **sections}, overrides)

    return make


CLOCKED = ("timing_s/", "perf/", "recovery/", "scheduler/", "rollout/tokens_per_second", "sync/bytes", "sync/num_")
"""How the names of metrics begin that measure time, or tell how something came to where it is, and what went wrong on
the way."""
COUNTED = ("rollout/batch_size", "rollout/batches", "rollout/merged_tokens")
"""What an engine did, which depends on how many there were."""
ROUNDED = ("training/rollout_logprob_diff_mean", "training/rollout_logprob_diff_max", "reward/", "critic/vf_explained")
"""What is rounded in another way when several workers generate and score."""


@pytest.fixture(scope="session")
def assert_same_run() -> Callable[..., None]:
    """Compares two runs: weights, optimizers, progress, what plugins keep, metrics and trajectories, to the bit."""
    return assert_same


def assert_same(run: Path, other: Path, *, other_counts: bool = False) -> None:
    """What `assert_same_run` does. other_counts: the runs had other numbers of workers, so that some metrics, and with
    them progress, tell that, or are rounded otherwise."""
    import torch

    from rollstock.checkpoint import CheckpointStore

    mine, theirs = (CheckpointStore(path / "checkpoints").load() for path in (run, other))
    assert mine.step == theirs.step
    assert sorted(mine.tensors) == sorted(theirs.tensors)
    for part, tensors in mine.tensors.items():
        assert sorted(tensors) == sorted(theirs.tensors[part])
        for name, tensor in tensors.items():
            assert torch.equal(tensor, theirs.tensors[part][name]), f"{part} {name}"
    if not other_counts:
        assert mine.score == theirs.score
        # trackers keep file positions, and those move with the digits of timings
        assert {**mine.state, "trackers": None} == {**theirs.state, "trackers": None}
    assert steady_rows(run, other_counts=other_counts) == steady_rows(other, other_counts=other_counts)
    assert trajectories(run) == trajectories(other)


def steady_rows(run: Path, *, other_counts: bool = False) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl without what a clock says; other_counts: nor how many workers there were."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for part in ("metrics", "evaluation"):
            kept = {name: value for name, value in row.get(part, {}).items() if not name.startswith(CLOCKED)}
            if other_counts and part == "metrics":
                kept = {name: value for name, value in kept.items() if not name.startswith(COUNTED)}
                kept |= {name: round(value, 5) for name, value in kept.items() if name.startswith(ROUNDED)}
            if part in row:
                row[part] = kept
    return rows


def trajectories(run: Path) -> dict[str, str]:
    """The files of a run's rollouts, by name."""
    return {path.name: path.read_text() for path in sorted((run / "rollouts").iterdir())}
