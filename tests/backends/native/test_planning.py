"""How requests are cut into batches."""

from hypothesis import given
from hypothesis import strategies as st

from rollstock import GenerationRequest
from rollstock.backends.native.planning import Footprint, Group, group_requests, next_batch, rows_that_fit


def batches(groups: list[Group], rows: int, *, mixes_lengths: bool = True) -> list[list[Group]]:
    found = []
    while groups:
        batch, groups = next_batch(groups, rows, mixes_lengths=mixes_lengths)
        found.append(batch)
    return found


def sizes(found: list[list[Group]]) -> list[list[int]]:
    return [[len(group.members) for group in batch] for batch in found]


def test_requests_with_equal_prompts_are_one_group_and_short_prompts_come_first() -> None:
    requests = [GenerationRequest(prompt=p, seed=0) for p in [(1, 2, 3), (4,), (1, 2, 3), (5,), (4,)]]
    assert group_requests(requests, [0, 1, 2, 3]) == [
        Group((4,), (1,)),
        Group((5,), (3,)),
        Group((1, 2, 3), (0, 2)),
    ]


def test_groups_are_kept_whole_unless_that_leaves_a_batch_half_empty() -> None:
    groups = [Group((i,), tuple(range(8))) for i in range(5)]
    assert sizes(batches(groups, 16)) == [[8, 8], [8, 8], [8]]
    assert sizes(batches(groups, 20)) == [[8, 8], [8, 8], [8]]
    assert sizes(batches(groups, 4)) == [[4]] * 10
    assert sizes(batches([Group((0,), (0, 1)), Group((1,), tuple(range(8)))], 6)) == [[2, 4], [4]]


def test_prompts_of_different_lengths_are_kept_apart_for_a_model_that_cannot_mix_them() -> None:
    groups = [Group((0,), (0,)), Group((1,), (1,)), Group((0, 1), (2,))]
    assert sizes(batches(groups, 16, mixes_lengths=False)) == [[1, 1], [1]]


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    rows=st.integers(1, 12),
    mixes=st.booleans(),
    lengths=st.lists(st.integers(1, 3), min_size=8, max_size=8),
)
def test_every_request_is_in_one_batch_and_no_batch_is_too_large(
    counts: list[int], rows: int, mixes: bool, lengths: list[int]
) -> None:
    places = iter(range(100))
    groups = [
        Group((i,) * n, tuple(next(places) for _ in range(count)))
        for i, (count, n) in enumerate(zip(counts, sorted(lengths), strict=False))
    ]
    found = batches(groups, rows, mixes_lengths=mixes)
    assert sorted(m for batch in found for group in batch for m in group.members) == list(range(sum(counts)))
    assert all(1 <= sum(len(group.members) for group in batch) <= rows for batch in found)
    if not mixes:
        assert all(len({len(group.prompt) for group in batch}) == 1 for batch in found)


def test_batches_grow_with_memory_and_shrink_with_length() -> None:
    footprint = Footprint(cached_token=1000, vocabulary=1000, shared=True)
    groups = [Group((i,) * 100, tuple(range(8))) for i in range(64)]

    def rows(budget: int, response: int) -> int:
        return rows_that_fit(budget, footprint, groups, response, 256)

    assert rows(10**10, 100) == 256
    assert rows(10**4, 100) == 1
    some = rows(2 * 10**7, 100)
    assert 16 < some < 256
    assert rows(2 * 10**7, 400) < some < rows(3 * 10**7, 100)
    # what was planned fits, one group more would not
    used = sum(footprint.prompt(100) for _ in range(-(-some // 8))) + some * footprint.row(100, 100)
    assert used <= 2 * 10**7 < used + footprint.prompt(100) + 8 * footprint.row(100, 100)


def test_prompts_that_are_not_shared_count_once_a_row() -> None:
    groups = [Group((0,) * 1000, tuple(range(64)))]
    shared, plain = (Footprint(cached_token=1000, vocabulary=10, shared=shared) for shared in (True, False))
    found = [rows_that_fit(10**7, footprint, groups, 10, 64) for footprint in (shared, plain)]
    assert found == [64, 4]
