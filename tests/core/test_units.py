"""Numbers for people: units that fit, and no more digits than help."""

import pytest

from rollstock.units import format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "1023 KiB"),
        (6 << 30, "6 GiB"),
        (3 << 40, "3 TiB"),
    ],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7"), (999, "999"), (1234, "1.23k"), (135_000_000, "135M"), (7.6e9, "7.6B")]
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.25 s"), (12.34, "12.3 s"), (245, "4 min 05 s"), (7800, "2 h 10 min")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
