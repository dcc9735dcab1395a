"""Metrics carry their reducer; nothing is inferred from their names."""

import math

import pytest

from rollstock import Metric, merge_metrics
from rollstock.metrics import metric_values


def merged(*metrics):
    return merge_metrics([{"x": metric} for metric in metrics])["x"]


def test_a_mean_is_weighted_by_what_stands_behind_it():
    assert merged(Metric(1.0, 3), Metric(5.0, 1)).value == 2.0
    assert merged(Metric(1.0, 3), Metric(5.0, 1), Metric(2.0, 4)).value == 2.0


def test_a_mean_over_nothing_drops_out_even_if_it_is_nan():
    assert merged(Metric(math.nan, 0), Metric(5.0, 1)).value == 5.0
    assert merged(Metric(5.0, 1), Metric(math.nan, 0)).value == 5.0
    assert metric_values({"x": Metric(0.0, 0)}) == {}


@pytest.mark.parametrize(("reducer", "expected"), [("sum", 6.0), ("max", 3.0), ("min", 1.0), ("last", 2.0)])
def test_each_reducer_does_what_it_says(reducer, expected):
    assert merged(*(Metric(v, 1.0, reducer) for v in (1.0, 3.0, 2.0))).value == expected


@pytest.mark.parametrize("reducer", ["max", "min"])
def test_a_nan_is_not_hidden_by_an_extreme(reducer):
    assert math.isnan(merged(Metric(math.nan, 1.0, reducer), Metric(1.0, 1.0, reducer)).value)
    assert math.isnan(merged(Metric(1.0, 1.0, reducer), Metric(math.nan, 1.0, reducer)).value)


def test_one_name_with_two_reducers_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="metric 'x'.*mean and sum"):
        merged(Metric(1.0), Metric(1.0, 1.0, "sum"))


def test_an_unknown_reducer_or_a_negative_weight_is_refused():
    with pytest.raises(ValueError, match="unknown reducer 'median'"):
        Metric(1.0, 1.0, "median")
    with pytest.raises(ValueError, match="must not be negative"):
        Metric(1.0, -1)
