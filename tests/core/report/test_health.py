"""The health section finds what went wrong, says where, and reports what is fine."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollstock.report.health import Item, build_health
from rollstock.report.reading import read_run


@pytest.fixture
def judge(write_run: Callable[..., Path]) -> Callable[..., dict[str, Item]]:
    def run(metrics: Mapping[int, Mapping[str, float]], **files: Any) -> dict[str, Item]:
        return {item.subject: item for item in build_health(read_run(write_run(metrics=metrics, **files)))}

    return run


Judge = Callable[..., dict[str, Item]]


@pytest.mark.parametrize(
    ("name", "values", "level", "where"),
    [
        ("reward/num_timed_out", [0, 2, 0, 1], "warning", "2 steps, 2 to 4"),
        ("reward/num_timed_out", [0, 0], "ok", ""),
        ("reward/num_raised", [1], "warning", "step 1"),
        ("reward/num_abstained", [0, 3], "info", "step 2"),
        ("reward/uniform_groups", [0.1, 0.2, 0.3, 0.4, 0.99], "warning", ""),
        ("reward/uniform_groups", [1.0, 0.9, 0.9, 0.9, 0.5], "ok", ""),
        ("response_length/clip_ratio", [0.1, 0.9], "warning", "step 2"),
        ("actor/skipped_updates", [0, 1], "warning", "step 2"),
        ("training/rollout_logprob_diff_max", [1e-5, 2.0], "warning", "step 2"),
        ("training/rollout_logprob_diff_max", [1e-5, 1e-4], "ok", ""),
        ("actor/pg_clipfrac", [0.9, 0.01, 0.01, 0.01, 0.01], "ok", ""),
        ("actor/grad_norm", [1, 1, 1, 30, 1], "info", ""),
        ("actor/entropy", [2, 1, 0.01, 0.01, 0.01, 0.01, 0.01], "warning", ""),
        ("actor/entropy", [2, 1, 1, 1, 1, 1], "ok", ""),
        ("sync/changed", [1, 0, 1], "info", "step 2"),
        ("train/num_empty_steps", [0, 1], "warning", "step 2"),
        ("prompt_length/num_truncated", [0, 1], "warning", "step 2"),
        ("response_length/num_truncated", [0, 3], "warning", "step 2"),
        ("tracker/num_failed", [0, 1], "info", "step 2"),
        ("rollout/halved_batches", [0, 1], "info", "step 2"),
    ],
)
def test_thresholds(judge: Judge, name: str, values: list[float], level: str, where: str) -> None:
    item = judge({step: {name: value} for step, value in enumerate(values, start=1)})[name]
    assert (item.level, item.steps) == (level, where)


def test_a_number_that_is_not_finite_is_found_in_any_metric(judge: Judge) -> None:
    item = judge({1: {"mine/x": 1.0}, 2: {"mine/x": math.nan}, 3: {"mine/x": -math.inf}})["mine/x"]
    assert (item.level, item.value, item.steps) == ("warning", "2 steps", "2 steps, 2 to 3")


def test_checks_bear_series_without_a_single_number(judge: Judge) -> None:
    names = ["actor/grad_norm", "reward/uniform_groups", "actor/entropy", "training/rollout_logprob_diff_max"]
    found = judge({1: dict.fromkeys(names, math.nan)})
    assert all(found[name].level in ("ok", "warning") for name in names)


def test_resumes_and_damage_are_told(judge: Judge, write_run: Callable[..., Path]) -> None:
    manifest = {"resumed": [{"at": "now", "step": 3, "changed": ["torch 2, was 1"]}, {"at": "then", "step": 4}]}
    path = write_run(metrics={}, manifest=manifest)
    (path / "checkpoints" / "step-000001").mkdir(parents=True)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"half')
    items = build_health(read_run(path))
    assert [item.level for item in items] == ["error", "warning", "info", "info"], "worst first"
    assert "torch 2, was 1" in items[2].meaning
    assert "same versions" in items[3].meaning
