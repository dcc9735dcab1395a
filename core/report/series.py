"""Curves for the page: metrics grouped into charts, and long runs thinned to what a screen can show.

A bucket of steps keeps its mean, lowest and highest value, so that spikes stay visible however long the run was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollstock.report.reading import Row, RunFiles

MAX_POINTS = 400
_FAMILY = re.compile(r"^(?P<base>.+?)(?P<joint>[/_])(?P<member>mean|max|min)$")
_MODE = re.compile(r"eval/(?P<mode>[^/]+)/(?P<quantity>.+)")
_EVALUATION_ORDER = ("solved", "exact", "accuracy", "pass", "reward", "score")
_KEY_CHARTS: tuple[tuple[str, str], ...] = (
    ("Reward", r"(reward|score)s?/(mean|max|min)|critic/score/(mean|max|min)"),
    ("Implicit reward of pairs", r"rewards/(chosen|rejected|margins)"),
    ("Pairs in the right order", r"rewards/accuracies"),
    ("Policy loss", r"actor/(pg_loss|loss|policy_loss)"),
    ("KL divergence", r"actor/(ppo_kl|kl|kl_loss|kl_reward|approx_kl)"),
    ("Entropy", r"actor/entropy(_loss)?"),
    ("Response length (tokens)", r"response_length/(mean|max|min)"),
    ("Gradient norm", r"actor/grad_norm"),
    ("Clipped ratios", r"actor/pg_clipfrac(_lower|_upper|_low|_high)?"),
    ("Value loss", r"critic/vf_loss"),
    ("Learning rate", r"(actor|critic)/lr"),
    ("Throughput (tokens/s)", r"perf/throughput"),
)


class Grid:
    """The steps of a run, cut into at most `MAX_POINTS` buckets of neighbours; all series use the same cuts."""

    def __init__(self, rows: Mapping[int, Row]) -> None:
        self._rows = [rows[step] for step in rows]
        steps = list(rows)
        count = min(len(steps), MAX_POINTS)
        self._cuts = [round(index * len(steps) / count) for index in range(count + 1)] if count else [0]
        self.steps = [steps[end - 1] for end in self._cuts[1:]]
        self.thinned = len(steps) > count

    def series(self, name: str, label: str) -> dict[str, Any]:
        """One metric on the grid: `y` (means), `lo` and `hi` where the run was thinned; None where it has no number."""
        spans = list(zip(self._cuts, self._cuts[1:], strict=False))
        buckets = [[row[name] for row in self._rows[start:end] if name in row] for start, end in spans]
        numbers = [[value for value in bucket if math.isfinite(value)] for bucket in buckets]
        found: dict[str, Any] = {"label": label, "y": [_rounded(sum(n) / len(n)) if n else None for n in numbers]}
        if self.thinned:
            found["lo"] = [_rounded(min(n)) if n else None for n in numbers]
            found["hi"] = [_rounded(max(n)) if n else None for n in numbers]
        return found


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def build_charts(run: RunFiles) -> list[dict[str, Any]]:
    """Every chart of the page in reading order: `section`, `title`, `kind` (line, stack), `x`, `series`."""
    grid = Grid(run.metrics)
    names = sorted({name for row in run.metrics.values() for name in row})
    overview: list[dict[str, Any]] = []
    used = {name for name in names if name.startswith("timing_s/")}
    for title, pattern in _KEY_CHARTS:
        members = [name for name in names if re.fullmatch(pattern, name)]
        if members:
            overview.append(_chart("Overview", title, grid, members))
            used.update(members)
    rest = [name for name in names if name not in used]
    more = [_chart(title.partition("/")[0], title, grid, members) for title, members in families(rest)]
    evaluation = _evaluation(run)
    if evaluation:  # what a reader looks for first stands beside the reward
        overview.insert(1 if overview else 0, {**evaluation.pop(0), "section": "Overview"})
    return overview + evaluation + _timing(grid, names) + more


def _evaluation(run: RunFiles) -> list[dict[str, Any]]:
    """Held-out results, the ways of sampling side by side in a chart; shares and rewards first, counts folded away."""
    grid = Grid(run.evaluations)
    by_quantity: dict[str, list[tuple[str, str]]] = {}
    for name in sorted({name for row in run.evaluations.values() for name in row}):
        match = _MODE.fullmatch(name)
        mode, quantity = (match["mode"], match["quantity"]) if match else (name, name)
        by_quantity.setdefault(quantity, []).append((mode, name))
    charts: list[dict[str, Any]] = []
    for quantity, members in sorted(by_quantity.items(), key=lambda item: evaluation_rank(item[0])):
        folded = evaluation_rank(quantity)[0] == len(_EVALUATION_ORDER)
        charts.append(
            {
                "section": "evaluation counts" if folded and charts else "Evaluation",
                "title": f"Held-out: {quantity.replace('_', ' ')}",
                "kind": "line",
                "x": grid.steps,
                "series": [grid.series(name, mode) for mode, name in members],
            }
        )
    return charts


def evaluation_rank(quantity: str) -> tuple[int, str]:
    """Sorts what evaluations measure: what was solved, then rewards, then all else."""
    last = len(_EVALUATION_ORDER)
    if "num_" in quantity:
        return last, quantity
    place = next((i for i, word in enumerate(_EVALUATION_ORDER) if word in quantity), last)
    return place, quantity


def families(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Names that differ only in mean, max, min share a chart: [("response_length", [".../mean", ".../max"]), ...]."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        match = _FAMILY.match(name)
        grouped.setdefault(match["base"] if match else name, []).append(name)
    return [(base if len(members) > 1 else members[0], members) for base, members in grouped.items()]


def _chart(section: str, title: str, grid: Grid, names: Sequence[str]) -> dict[str, Any]:
    by_member = {re.split(r"[/_]", name)[-1]: name for name in names}
    if set(by_member) == {"mean", "max", "min"} and len(names) == 3:
        series = [_range(grid, by_member)]
    else:
        series = [grid.series(name, name) for name in names]
    return {"section": section, "title": title, "kind": "line", "x": grid.steps, "series": series}


def _range(grid: Grid, by_member: Mapping[str, str]) -> dict[str, Any]:
    """Mean, least and most of one quantity as a curve within a band."""
    mean, low, high = (grid.series(by_member[member], by_member["mean"]) for member in ("mean", "min", "max"))
    return {**mean, "lo": low.get("lo", low["y"]), "hi": high.get("hi", high["y"]), "range": True}


def _timing(grid: Grid, names: Sequence[str]) -> list[dict[str, Any]]:
    """Stages on top of each other; what the step took beyond them is shown as such, never hidden."""
    stages = [name for name in names if name.startswith("timing_s/") and name != "timing_s/step"]
    if not stages:
        return []
    series = [grid.series(name, name.removeprefix("timing_s/")) for name in stages]
    series.sort(key=lambda one: -sum(value or 0.0 for value in one["y"]))
    sums = [sum(one["y"][index] or 0.0 for one in series) for index in range(len(grid.steps))]
    totals = grid.series("timing_s/step", "step")["y"] if "timing_s/step" in names else [None] * len(sums)
    pairs = [(total, part) for total, part in zip(totals, sums, strict=True) if total is not None]
    nested = any(part > total * 1.05 + 1e-3 for total, part in pairs)  # then some timings lie within others
    if pairs and not nested:
        rest = [
            max(0.0, _rounded(total - part)) if total is not None else None
            for total, part in zip(totals, sums, strict=True)
        ]
        series.append({"label": "everything else", "y": rest})
    kind = "line" if nested else "stack"
    return [
        {"section": "Timings", "title": "Seconds per step, by stage", "kind": kind, "x": grid.steps, "series": series}
    ]
