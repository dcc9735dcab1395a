"""Length balance: verl's numbers for parts in the order of the batch, and for balanced ones."""

import pytest

from rollstock.plugins.extensions.length_balance import balance_metrics


def values(lengths, parts, **options):
    found = balance_metrics(lengths, parts, **options)
    return {name.removeprefix("global_seqlen/"): metric.value for name, metric in found.items()}


def test_parts_in_order_and_balanced():
    # In order: 8 + 7 and 3 + 2; balanced: 8 + 2 and 7 + 3.
    assert values([8, 7, 3, 2], 2) == {
        "min": 5, "max": 15, "minmax_diff": 10, "mean": 10, "balanced_min": 10, "balanced_max": 10,
    }  # fmt: skip


def test_a_number_of_trajectories_that_does_not_divide():
    # In order: [9], [1, 1], [1, 4] of 5 in 3 parts; balanced: 9, 4 and 3.
    found = values([9, 1, 1, 1, 4], 3)
    assert (found["min"], found["max"], found["mean"]) == (2, 9, pytest.approx(16 / 3))
    assert (found["balanced_min"], found["balanced_max"]) == (3, 9)


def test_equal_counts_leave_less_freedom():
    assert values([9, 1, 1, 1], 2)["balanced_min"] == 3
    assert values([9, 1, 1, 1], 2, equal_counts=True)["balanced_min"] == 2


def test_fewer_trajectories_than_parts_leave_empty_ones():
    found = values([5], 2)
    assert (found["min"], found["max"], found["balanced_min"], found["balanced_max"]) == (0, 5, 0, 5)


def test_a_run_has_as_many_parts_as_the_actor_has_workers_and_at_least_two(stages, stand_in, scored_batch):
    for count, expected in ((1, 2), (3, 3)):
        run = stand_in(config=Config(count))
        stages(run, {"name": "length_balance"})("prepare", scored_batch([0.0] * 6))
        assert run.value("global_seqlen/mean") == 12 / expected  # six of two tokens each
    run = stand_in(config=Config(3))
    stages(run, {"name": "length_balance", "partitions": 4})("prepare", scored_batch([0.0] * 6))
    assert run.value("global_seqlen/mean") == 3


class Config:
    def __init__(self, count):
        self.count = count

    def role(self, name):
        assert name == "actor"
        return self


def test_a_run_records_it_each_step(steps_of_run):
    for metrics in steps_of_run("run", extensions=["length_balance"]):
        assert metrics["global_seqlen/balanced_min"] <= metrics["global_seqlen/mean"]
        assert metrics["global_seqlen/mean"] <= metrics["global_seqlen/balanced_max"] <= metrics["global_seqlen/max"]
        assert 2 * metrics["global_seqlen/mean"] == metrics["sequence_length/mean"] * metrics["train/num_trajectories"]
