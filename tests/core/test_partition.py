"""Balanced partitions: a known case, every small case against brute force, and what always holds."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstock import balanced_partitions

lengths_ = st.lists(st.integers(0, 200), max_size=40)
parts_ = st.integers(1, 9)


def sums(lengths, parts):
    return [sum(lengths[i] for i in part) for part in parts]


def test_known_case(cases):
    case = cases["balanced_partitions"]
    assert balanced_partitions(case["lengths"], case["k"], equal_size=case["equal_size"]) == case["parts"]


def test_example_of_the_differencing_method():
    # 8, 7, 6, 5, 4 in two parts: differencing leaves a difference of 2 (the best is 0), a greedy split leaves 4.
    parts = balanced_partitions([8, 7, 6, 5, 4], 2)
    assert sums([8, 7, 6, 5, 4], parts) == [16, 14]


@given(lengths_, parts_, st.booleans())
def test_each_index_is_in_one_part_and_the_largest_part_is_first(lengths, k, equal_size):
    parts = balanced_partitions(lengths, k, equal_size)
    assert len(parts) == k
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    assert sums(lengths, parts) == sorted(sums(lengths, parts), reverse=True)


@given(lengths_, parts_)
def test_equal_sizes_differ_by_one_at_most(lengths, k):
    sizes = [len(part) for part in balanced_partitions(lengths, k, equal_size=True)]
    assert max(sizes) - min(sizes) <= (1 if len(lengths) % k else 0)


@given(lengths_, parts_)
def test_no_part_is_more_than_one_length_above_the_average(lengths, k):
    largest = sums(lengths, balanced_partitions(lengths, k))[0]
    assert largest <= sum(lengths) / k + max(lengths, default=0)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_is_near_the_best_of_all_splits(lengths, k):
    best = min(
        max(sum(n for n, place in zip(lengths, places, strict=True) if place == part) for part in range(k))
        for places in product(range(k), repeat=len(lengths))
    )
    # The differencing method is within 4/3 - 1/(3k) of the best (Michiels, Korst, Aarts 2003).
    assert sums(lengths, balanced_partitions(lengths, k))[0] <= best * (4 / 3 - 1 / (3 * k)) + 1e-9


def test_fewer_numbers_than_parts_leave_some_empty():
    assert balanced_partitions([3, 5], 4) == [[1], [0], [], []]
    assert balanced_partitions([], 2) == [[], []]


@pytest.mark.parametrize(("lengths", "k"), [([1], 0), ([1, -1], 2)])
def test_impossible_requests_are_refused(lengths, k):
    with pytest.raises(ValueError, match="split"):
        balanced_partitions(lengths, k)
