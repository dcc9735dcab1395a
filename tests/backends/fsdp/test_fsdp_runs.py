"""Whole runs: two processes of `fsdp` on Ray learn what one process of `torch` learns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rollstock.export import export
from rollstock.launch import resume, train
from rollstock.testing import read_metrics

pytestmark = pytest.mark.cluster
SIZE = {"train": {"steps": 4, "prompts_per_step": 4}, "checkpoint": {"every_steps": 2}}
RAY = {"name": "ray", "dashboard": False, "object_store_memory": 100 << 20}
WORKERS = [
    "roles.actor.count=2",
    "roles.critic.count=2",
    *(f"roles.{role}.colocate_with=actor" for role in ("critic", "rollout", "reward")),
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As many threads here as the workers have, and no Ray of somebody else."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def curve(directory: Path) -> list[dict[str, float]]:
    """What was learned and evaluated, row by row, without times and what the network carried."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = ("actor/", "critic/", "reward/", "response_length/", "eval/")
    found = [row.get("metrics", row.get("evaluation")) for row in rows]
    return [{k: v for k, v in row.items() if k.startswith(kept) and "memory" not in k} for row in found]


def assert_same(found: Path, expected: Path) -> None:
    for ours, theirs in zip(curve(found), curve(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_two_processes_on_ray_learn_what_one_learns(tmp_path: Path, small_run: Callable[..., Any]) -> None:
    pytest.importorskip("ray")
    sections = {**SIZE, "algorithm": {"name": "ppo"}}
    train(small_run(tmp_path / "torch", **sections))
    fsdp = {"backend": {"name": "fsdp", "learning_rate": 1e-2}, "executor": RAY, "compressor": {"name": "none"}}
    train(small_run(tmp_path / "fsdp", *WORKERS, **sections, **fsdp))
    assert_same(tmp_path / "fsdp", tmp_path / "torch")
    weights = [
        load_file(export(tmp_path / name, tmp_path / f"{name}-model") / "model.safetensors")
        for name in ("fsdp", "torch")
    ]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_what_two_processes_train_reaches_two_generators_by_shared_memory(
    tmp_path: Path, small_run: Callable[..., Any]
) -> None:
    pytest.importorskip("ray")
    train(small_run(tmp_path / "torch", **SIZE))
    fsdp = {"backend": {"name": "fsdp", "learning_rate": 1e-2}, "executor": RAY, "transport": "shm"}
    counts = ["roles.actor.count=2", "roles.rollout.count=2", "roles.reward.colocate_with=rollout"]
    train(small_run(tmp_path / "fsdp", *counts, **SIZE, **fsdp))
    assert_same(tmp_path / "fsdp", tmp_path / "torch")
    steps = [row["metrics"] for row in read_metrics(tmp_path / "fsdp") if "metrics" in row]
    assert [step["sync/changed"] for step in steps] == [1.0] * 4  # and both generators have the trainer's fingerprint
    assert all(step["sync/bytes"] > 4 * 1000 for step in steps)  # some thousand float32
    weights = [
        load_file(export(tmp_path / name, tmp_path / f"{name}-model") / "model.safetensors")
        for name in ("fsdp", "torch")
    ]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_a_run_goes_on_with_another_backend(tmp_path: Path, small_run: Callable[..., Any]) -> None:
    train(small_run(tmp_path / "torch", **SIZE))
    train(small_run(tmp_path / "half", "train.steps=2", **SIZE, backend={"name": "fsdp", "learning_rate": 1e-2}))
    path = tmp_path / "half" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["train"]["steps"], config["backend"] = 4, {"name": "torch", "learning_rate": 1e-2}
    path.write_text(yaml.safe_dump(config))
    assert resume(tmp_path / "half").step == 4
    steps, expected = ([row for row in curve(tmp_path / name) if "actor/lr" in row] for name in ("half", "torch"))
    assert len(steps) == 4
    for ours, theirs in zip(steps, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
