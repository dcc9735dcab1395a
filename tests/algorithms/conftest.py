"""Small batches and configs for tests of algorithms."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollstock import Batch, MicroBatch, RunConfig, Totals, Trajectory
from rollstock.testing import tiny_config


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """A batch from masks (one list of 0 and 1 a trajectory), scores and groups."""

    def make(masks, scores, groups=None) -> Batch:
        return Batch.from_trajectories(
            [
                Trajectory(
                    prompt=torch.tensor([1]),
                    response=torch.arange(len(mask)),
                    action_mask=torch.tensor(mask, dtype=torch.bool),
                    rollout_logprobs=torch.zeros(len(mask)),
                    versions=torch.zeros(len(mask), dtype=torch.int64),
                    group=0 if groups is None else groups[i],
                    reward=scores[i],
                )
                for i, mask in enumerate(masks)
            ]
        )

    return make


@pytest.fixture
def make_micro() -> Callable[..., MicroBatch]:
    """A whole batch as a loss sees it: log-probs `[B, T]` that carry a gradient, and columns `[B, T]`."""

    def make(batch: Batch, logprobs: torch.Tensor, **columns: torch.Tensor) -> MicroBatch:
        for name, value in columns.items():
            batch[name] = value
        return MicroBatch(batch, Totals.of(batch, response_limit=4), {"logprobs": logprobs.requires_grad_()})

    return make


@pytest.fixture
def small_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """The config of a tiny run, with `path=value` overrides: what `validate` is given."""
    return lambda *overrides: tiny_config(tmp_path / "run", overrides=overrides)
