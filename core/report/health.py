"""What went wrong, or nearly, in a run: counts and thresholds over its metrics, each with what it means.

A metric that a check looks at and that is as it should be is reported too: "nothing was truncated" is worth knowing.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rollstock.report.reading import RunFiles, finite

Level = Literal["ok", "info", "warning", "error"]
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Item:
    """One line of the health section: `subject` names the metric or file, `steps` where it happened."""

    level: Level
    subject: str
    value: str
    meaning: str
    steps: str = ""


@dataclass(frozen=True)
class Check:
    """How one kind of metric is judged: `judge` turns its points into a level and a shown value."""

    pattern: str
    meaning: str
    judge: Callable[[Points], tuple[Level, str]]
    where: Callable[[float], bool] | None = bool
    """At which values the steps are named; None for judgements on a whole curve."""


def _count(level: Level) -> Callable[[Points], tuple[Level, str]]:
    def judge(points: Points) -> tuple[Level, str]:
        total = sum(finite([value for _, value in points]))
        return (level if total else "ok"), f"{total:g} in total"

    return judge


def _late_mean(limit: float) -> Callable[[Points], tuple[Level, str]]:
    """The mean over the last fifth of the run, compared with `limit`."""

    def judge(points: Points) -> tuple[Level, str]:
        late = finite([value for _, value in points[-max(1, len(points) // 5) :]])
        if not late:
            return "ok", "no number"
        mean = sum(late) / len(late)
        return ("warning" if mean > limit else "ok"), f"{mean:.3g} of late"

    return judge


def _largest(limit: float) -> Callable[[Points], tuple[Level, str]]:
    def judge(points: Points) -> tuple[Level, str]:
        largest = max(finite([value for _, value in points]), default=0.0)
        return ("warning" if largest > limit else "ok"), f"{largest:.3g} at most"

    return judge


def _spikes(points: Points) -> tuple[Level, str]:
    values = finite([value for _, value in points])
    if not values:
        return "ok", "no number"
    median = statistics.median(values)
    high = sum(value > 20 * median for value in values) if median > 0 else 0
    return ("info" if high else "ok"), f"median {median:.3g}, {max(values):.3g} at most"


def _collapse(points: Points) -> tuple[Level, str]:
    values = finite([value for _, value in points])
    if len(values) < 5:
        return "ok", "too short a run to tell"
    early, late = values[0], sum(values[-5:]) / 5
    return ("warning" if early > 0 and late < 0.05 * early else "ok"), f"{early:.3g} at first, {late:.3g} of late"


def _unchanged(points: Points) -> tuple[Level, str]:
    missed = sum(value == 0 for _, value in points)
    return ("info" if missed else "ok"), f"{missed} of {len(points)} steps"


def _over(limit: float) -> Callable[[float], bool]:
    return lambda value: value > limit


CHECKS: tuple[Check, ...] = (
    Check(r"reward/num_timed_out", "Rewards that ran into their time limit and were ended.", _count("warning")),
    Check(r"reward/num_raised", "Rewards that raised; the log names each sample.", _count("warning")),
    Check(r"reward/num_unscored", "Samples that no reward scored; they were not trained on.", _count("warning")),
    Check(r"reward/num_abstained", "Rewards that abstained (no opinion is not a 0).", _count("info")),
    Check(
        r"reward/uniform_groups",
        "Groups of equal rewards teach group methods nothing.",
        _late_mean(0.9),
        None,
    ),
    Check(r"train/num_empty_steps", "Steps from which everything was dropped.", _count("warning")),
    Check(r"prompt_length/num_(truncated|skipped)", "Prompts cut or skipped for being too long.", _count("warning")),
    Check(r"response_length/clip_ratio", "Responses that hit the token limit (share).", _late_mean(0.3), _over(0.3)),
    Check(r"response_length/num_truncated", "Responses of the data that were cut at the limit.", _count("warning")),
    Check(r"response_length/num_empty", "Responses without a single token.", _count("info")),
    Check(r".*skipped_updates", "Updates skipped because a gradient was not finite.", _count("warning")),
    Check(r".*logprobs?_diff.*max", "Sampler and trainer disagree by this much (nats).", _largest(0.5), _over(0.5)),
    Check(
        r".*pg_clipfrac.*", "Clipped ratios (share); many mean steps that are too large.", _late_mean(0.3), _over(0.3)
    ),
    Check(r".*grad_norm", "Gradient norm; lone peaks of 20 times the median are shown.", _spikes, None),
    Check(r".*/entropy", "When the entropy is gone, the policy explores no more.", _collapse, None),
    Check(r"sync/changed", "Steps after which the generator's weights were as before.", _unchanged, lambda v: v == 0),
    Check(r".*stale.*", "Age of the policy that made the samples, in updates.", _largest(4), _over(4)),
    Check(
        r"(?!perf/).*(num_(failed|retr|dropped|lost|oom|error|restart)|halved_batches).*",
        "Counted as it happened.",
        _count("info"),
    ),
)


def build_health(run: RunFiles) -> list[Item]:
    """Everything that the checks and the files have to say, worst first."""
    points: dict[str, list[tuple[int, float]]] = {}
    for step, row in run.metrics.items():
        for name, value in row.items():
            points.setdefault(name, []).append((step, value))
    items = _about_files(run)
    for name in sorted(points):
        odd = [(step, value) for step, value in points[name] if not math.isfinite(value)]
        if odd:
            items.append(Item("warning", name, f"{len(odd)} steps", "Not a finite number.", _span([s for s, _ in odd])))
        check = next((check for check in CHECKS if re.fullmatch(check.pattern, name)), None)
        if check is not None:
            level, shown = check.judge(points[name])
            steps = [step for step, found in points[name] if level != "ok" and check.where and check.where(found)]
            items.append(Item(level, name, shown, check.meaning, _span(steps)))
    rank = {"error": 0, "warning": 1, "info": 2, "ok": 3}
    return sorted(items, key=lambda item: rank[item.level])


def _about_files(run: RunFiles) -> list[Item]:
    items = [Item("error", "checkpoint", "damaged", fault) for fault in run.damaged_checkpoints]
    for name, count in run.unreadable.items():
        items.append(Item("warning", name, f"{count} unreadable", "Half-written or damaged lines, left out here."))
    for resumed in run.manifest.get("resumed", []):
        changed = "; ".join(resumed.get("changed", [])[:6])
        meaning = f"Went on with other versions: {changed}" if changed else "Went on with the same versions."
        items.append(Item("info", "resumed", f"from step {resumed.get('step')}", meaning, str(resumed.get("at", ""))))
    return items


def _span(steps: list[int]) -> str:
    if not steps:
        return ""
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
