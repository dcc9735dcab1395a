"""Metrics that carry how they are reduced, from where they are made to where they are written.

For whoever measures something inside a step: a value made in a micro-batch, on a rank or in an epoch is combined with
its likes by the reducer that it carries. Nothing is ever inferred from a metric's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Reducer: TypeAlias = Literal["mean", "sum", "max", "min", "last"]
REDUCERS: tuple[Reducer, ...] = ("mean", "sum", "max", "min", "last")


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured value, the weight that it has in a mean, and the way it combines with others of its name.

    `mean` is the weighted mean (weight: how many tokens, sequences or seconds stand behind the value), and a weight of
    0 drops out; `sum`, `max`, `min` and `last` ignore the weight. Raises ValueError for an unknown reducer or a
    negative weight.
    """

    value: float
    weight: float = 1.0
    reducer: Reducer = "mean"

    def __post_init__(self) -> None:
        if self.reducer not in REDUCERS:
            raise ValueError(f"unknown reducer {self.reducer!r}; a metric's reducer is one of {', '.join(REDUCERS)}")
        if not self.weight >= 0:
            raise ValueError(f"a metric's weight must not be negative, not {self.weight}")

    def merge(self, other: Metric) -> Metric:
        """Combine with a later value of the same metric; raises ValueError if the two reducers differ."""
        if self.reducer != other.reducer:
            raise ValueError(f"one metric was recorded with two reducers, {self.reducer} and {other.reducer}")
        match self.reducer:
            case "mean":
                weight = self.weight + other.weight
                if weight == 0:
                    return self
                if other.weight == 0:
                    return self
                if self.weight == 0:
                    return other
                return Metric((self.value * self.weight + other.value * other.weight) / weight, weight, "mean")
            case "sum":
                return Metric(self.value + other.value, 1.0, "sum")
            case "max":
                return Metric(_extreme(max, self.value, other.value), 1.0, "max")
            case "min":
                return Metric(_extreme(min, self.value, other.value), 1.0, "min")
            case "last":
                return other


Metrics: TypeAlias = dict[str, Metric]


def _extreme(choose: object, first: float, second: float) -> float:
    """`max` or `min`, in which a NaN on either side wins, so that it is seen."""
    if math.isnan(first) or math.isnan(second):
        return math.nan
    return max(first, second) if choose is max else min(first, second)


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Combine the metrics of several micro-batches, ranks or epochs, each by its reducer, in the order given.

    Raises ValueError, naming the metric, if two parts record one name with two reducers.
    """
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            try:
                merged[name] = merged[name].merge(metric) if name in merged else metric
            except ValueError as error:
                raise ValueError(f"metric {name!r}: {error}") from error
    return merged


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The plain numbers, by name; a mean over nothing (weight 0) is left out."""
    return {name: m.value for name, m in sorted(metrics.items()) if m.reducer != "mean" or m.weight > 0}
