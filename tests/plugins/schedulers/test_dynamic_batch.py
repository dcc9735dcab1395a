"""Micro-batches keep the budget and are balanced; generation batches fit into memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstock import Memory
from rollstock.plugins.schedulers.dynamic_batch import DynamicBatch, DynamicBatchConfig

GIB = 2**30
lengths_ = st.lists(st.integers(0, 120), max_size=40)


def scheduler(**options):
    return DynamicBatch(DynamicBatchConfig(**options))


def memory(total, free=None):
    return Memory(total=total, free=total if free is None else free, allocated=0, peak=0)


@given(lengths_, st.integers(1, 300), st.integers(1, 4), st.booleans())
def test_every_sequence_is_in_one_micro_batch_within_the_budget(lengths, budget, num_parts, equal_size):
    parts = scheduler(tokens_per_micro_batch=budget, equal_size=equal_size).micro_batches(lengths, num_parts=num_parts)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert len(parts) % num_parts == 0
    assert all(len(part) <= 1 or sum(lengths[i] for i in part) <= budget for part in parts)


@given(lengths_, st.integers(1, 300), st.data())
def test_groups_that_fit_stay_together(lengths, budget, data):
    groups = [data.draw(st.integers(0, 5)) for _ in lengths]
    parts = scheduler(tokens_per_micro_batch=budget).micro_batches(lengths, groups=groups)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(len(part) <= 1 or sum(lengths[i] for i in part) <= budget for part in parts)
    for group in set(groups):
        members = {i for i, g in enumerate(groups) if g == group}
        if sum(lengths[i] for i in members) <= budget:
            assert any(members <= set(part) for part in parts)


def test_one_micro_batch_where_everything_fits():
    assert scheduler(tokens_per_micro_batch=100).micro_batches([10] * 10) == [list(range(10))]


def test_few_and_balanced_micro_batches():
    lengths = [100, 90, 80, 70, 60, 50, 40, 30, 20, 10]
    parts = scheduler(tokens_per_micro_batch=200).micro_batches(lengths)
    assert len(parts) == 3
    assert max(sum(lengths[i] for i in part) for part in parts) <= 190


def test_a_sequence_over_the_budget_is_alone():
    assert scheduler(tokens_per_micro_batch=50).micro_batches([200, 10, 10]) == [[0], [1, 2]]


def test_groups_are_cut_only_where_they_are_too_long():
    parts = scheduler(tokens_per_micro_batch=40).micro_batches([10] * 8, groups=[0, 0, 1, 1, 1, 1, 1, 1])
    assert sorted(len(part) for part in parts) == [2, 3, 3]
    assert [0, 1] in parts


def test_ranks_get_even_rounds_of_micro_batches():
    lengths = [50, 49, 30, 29, 10, 9]
    parts = scheduler(tokens_per_micro_batch=50).micro_batches(lengths, num_parts=2)
    loads = [[sum(lengths[i] for i in part) for part in parts[rank::2]] for rank in (0, 1)]
    assert abs(sum(loads[0]) - sum(loads[1])) <= 10
    assert all(abs(a - b) <= 10 for a, b in zip(*loads, strict=True))


def test_fewer_sequences_than_ranks():
    assert scheduler().micro_batches([5], num_parts=3) == [[0], [], []]


def test_no_sequences():
    assert scheduler().micro_batches([]) == [[]]


def test_thousands_of_sequences_that_fill_half_a_micro_batch_each():
    lengths = [51 + i % 7 for i in range(3000)]
    parts = scheduler(tokens_per_micro_batch=100).micro_batches(lengths)
    assert sorted(len(part) for part in parts) == [1] * 3000


@pytest.mark.parametrize(
    ("total", "free", "size"),
    [
        (1000 * GIB, None, 256),  # everything fits
        (10 * GIB, None, 128),  # 3 GiB are for caches, 20 MiB for a sequence: 153 fit
        (10 * GIB, GIB, 32),  # 0.9 GiB are free: 46 fit
        (GIB, None, 16),  # 15 would fit; the smallest batch is tried all the same
    ],
)
def test_generation_batches_by_memory(total, free, size):
    found = scheduler(memory_share=0.3).generation_batch_size(
        [512] * 300, 512, bytes_per_token=20 * 1024, memory=memory(total, free)
    )
    assert found == size


def test_generation_batches_by_length():
    make = scheduler(memory_share=0.5).generation_batch_size
    room = memory(2 * GIB)
    short, long = ([n] * 300 for n in (100, 4000))
    sizes = [make(lengths, 100, bytes_per_token=50_000, memory=room) for lengths in (short, long)]
    assert sizes == [64, 16]
    # A few long prompts count as what they are, not as if all were.
    assert make([4000, *short], 100, bytes_per_token=50_000, memory=room) == 64


def test_bounds_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match=r"min_generation_batch \(64\) is above max_generation_batch \(32\)"):
        DynamicBatchConfig(min_generation_batch=64, max_generation_batch=32)
