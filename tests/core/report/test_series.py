"""Metrics become charts: grouped, thinned without losing spikes, nothing left out."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from rollstock.report.reading import read_run
from rollstock.report.series import MAX_POINTS, Grid, build_charts, families


def test_a_short_run_is_shown_as_it_is() -> None:
    grid = Grid({1: {"a": 1.0}, 2: {}, 3: {"a": math.inf}, 7: {"a": 0.1234567}})
    assert grid.steps == [1, 2, 3, 7]
    assert grid.series("a", "A") == {"label": "A", "y": [1.0, None, None, 0.12346]}


@pytest.mark.parametrize("num_steps", [MAX_POINTS + 1, 777, 10_000])
def test_a_long_run_is_thinned_to_means_and_keeps_its_spikes_and_its_ends(num_steps: int) -> None:
    rows = {step: {"a": 1.0 if step != 123 else 500.0} for step in range(1, num_steps + 1)}
    grid = Grid(rows)
    series = grid.series("a", "a")
    assert len(grid.steps) == len(series["y"]) == MAX_POINTS
    assert grid.steps[-1] == num_steps
    assert grid.steps == sorted(set(grid.steps))
    assert max(series["hi"]) == 500.0
    assert min(series["lo"]) == 1.0
    spans = [b - a for a, b in zip([0, *grid.steps], grid.steps, strict=False)]
    assert sum(y * n for y, n in zip(series["y"], spans, strict=True)) == pytest.approx(num_steps + 499, rel=1e-4)


def test_an_empty_run_has_no_charts(write_run: Callable[..., Path]) -> None:
    assert build_charts(read_run(write_run())) == []


def test_names_that_differ_in_mean_max_min_share_a_chart() -> None:
    assert families(["a/max", "a/mean", "b/max", "c_max", "c_mean", "d"]) == [
        ("a", ["a/max", "a/mean"]),
        ("b/max", ["b/max"]),
        ("c", ["c_max", "c_mean"]),
        ("d", ["d"]),
    ]


def test_every_metric_is_in_exactly_one_chart_and_the_evaluation_stands_beside_the_reward(
    write_run: Callable[..., Path],
) -> None:
    names = ["reward/mean", "reward/max", "reward/min", "reward/std", "actor/pg_loss", "mine/odd", "timing_s/gen"]
    evaluation = {"eval/greedy/solved": 0.5, "eval/sampled/solved": 0.4, "eval/greedy/num_unscored": 8.0}
    charts = build_charts(read_run(write_run(metrics={1: dict.fromkeys(names, 1.0)}, evaluations={0: evaluation})))
    assert [(chart["section"], chart["title"]) for chart in charts] == [
        ("Overview", "Reward"),
        ("Overview", "Held-out: solved"),
        ("Overview", "Policy loss"),
        ("evaluation counts", "Held-out: num unscored"),
        ("Timings", "Seconds per step, by stage"),
        ("mine", "mine/odd"),
        ("reward", "reward/std"),
    ]
    reward, solved = charts[0]["series"], charts[1]["series"]
    assert [(one["label"], one["range"]) for one in reward] == [("reward/mean", True)]
    assert [(one["label"], one["y"]) for one in solved] == [("greedy", [0.5]), ("sampled", [0.4])]


def test_mean_least_and_most_become_a_curve_in_a_band(write_run: Callable[..., Path]) -> None:
    rows = {step: {"x/mean": 1.0 * step, "x/min": 0.5 * step, "x/max": 2.0 * step} for step in range(1, 1001)}
    (series,) = build_charts(read_run(write_run(metrics=rows)))[0]["series"]
    assert series["lo"][-1] < series["y"][-1] < series["hi"][-1]
    assert series["hi"][-1] == 2000.0


def test_timings_are_stacked_with_what_is_left_of_the_step(write_run: Callable[..., Path]) -> None:
    row = {"timing_s/gen": 1.0, "timing_s/update": 2.0, "timing_s/step": 3.5}
    (chart,) = build_charts(read_run(write_run(metrics={1: row, 2: row})))
    assert chart["kind"] == "stack"
    assert [(one["label"], one["y"]) for one in chart["series"]] == [
        ("update", [2.0, 2.0]),
        ("gen", [1.0, 1.0]),
        ("everything else", [0.5, 0.5]),
    ]


def test_timings_that_contain_each_other_are_not_stacked(write_run: Callable[..., Path]) -> None:
    row = {"timing_s/gen": 3.0, "timing_s/gen_decode": 2.5, "timing_s/step": 3.5}
    (chart,) = build_charts(read_run(write_run(metrics={1: row})))
    assert chart["kind"] == "line"
    assert len(chart["series"]) == 2
