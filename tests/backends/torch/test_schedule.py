"""Learning rates against numbers worked out by hand."""

from typing import Any

import pytest

from rollstock.backends.torch.schedule import rate_factor


def factors(count: int, **options: Any) -> list[float]:
    given = {"schedule": "constant", "warmup_updates": 0, "total_updates": count, "min_ratio": 0.0, **options}
    return [rate_factor(i, **given) for i in range(count)]


def test_constant_stays() -> None:
    assert factors(3) == [1.0, 1.0, 1.0]


def test_the_warm_up_rises_in_a_line_and_its_first_update_is_not_wasted() -> None:
    assert factors(6, warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_its_minimum_at_the_last_update() -> None:
    assert factors(5, schedule="linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert factors(5, schedule="linear", min_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_linear_after_a_warm_up() -> None:
    assert factors(6, schedule="linear", warmup_updates=2) == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_cosine_falls_in_half_a_wave() -> None:
    root = 0.7071067811865476  # cos(45 degrees)
    assert factors(5, schedule="cosine") == pytest.approx([1.0, (1 + root) / 2, 0.5, (1 - root) / 2, 0.0])
    assert factors(3, schedule="cosine", min_ratio=0.1) == pytest.approx([1.0, 0.55, 0.1])


def test_updates_beyond_the_planned_ones_keep_the_minimum() -> None:
    given: dict[str, Any] = {"schedule": "linear", "warmup_updates": 0, "total_updates": 3, "min_ratio": 0.1}
    assert rate_factor(7, **given) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_run_of_one_update_ends_where_it_starts(schedule: str) -> None:
    assert factors(1, schedule=schedule, min_ratio=0.5) == [0.5]
    assert factors(1, schedule=schedule, warmup_updates=1) == [1.0]
