"""Where tokens stand in a packed stream, and which attention calls cover it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollstock import Batch
from rollstock.backends.torch.layout import Layout, make_layout
from rollstock.testing import make_trajectory


def batch_of(rows: list[tuple[int, int]]) -> Batch:
    """Trajectories of (prompt length, response length); prompts of one length are equal, others differ at once."""
    return Batch.from_trajectories(
        [
            make_trajectory(length, group=width, seed=i, vocab_size=9999, prompt=[width, *range(1, width)])
            for i, (width, length) in enumerate(rows)
        ]
    )


def alike(rows: list[tuple[int, int]]) -> Batch:
    """The same with prompts and responses of two tokens, which often begin alike."""
    return Batch.from_trajectories(
        [
            make_trajectory(length, group=width, seed=i, vocab_size=3, prompt=[1, 2, 1, 1, 2, 2][:width])
            for i, (width, length) in enumerate(rows)
        ]
    )


def sequence_before(layout: Layout, index: int) -> list[int]:
    """The tokens that the stream's token at `index` may see, in order of position: found through the calls."""
    row = index if layout.places is None else int(layout.places[index])
    rows = torch.arange(len(layout.tokens)) if layout.rows is None else layout.rows
    starts = [0]
    for call in layout.calls:
        starts.append(starts[-1] + call.size * call.width)
    number = next(i for i, end in enumerate(starts[1:]) if row < end)
    call = layout.calls[number]
    segment, place = divmod(row - starts[number], call.width)
    own = rows[starts[number] + segment * call.width :][: place + 1]
    if call.prefix is None:
        return layout.tokens[own].tolist()
    parent = layout.calls[call.prefix.call]
    first = starts[call.prefix.call] + call.prefix.row * parent.width
    return layout.tokens[torch.cat([rows[first : first + call.prefix.length], own])].tolist()


@given(
    rows=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=9),
    few=st.booleans(),
    share_prompts=st.booleans(),
    keep_last=st.booleans(),
)
def test_every_response_token_is_predicted_from_its_own_past(
    rows: list[tuple[int, int]], few: bool, share_prompts: bool, keep_last: bool
) -> None:
    batch = alike(rows) if few else batch_of(rows)
    layout = make_layout(batch, share_prompts=share_prompts, keep_last=keep_last)
    starts = (torch.cumsum(batch.lengths, 0) - batch.lengths).tolist()
    pasts = []
    for i, prompt in enumerate(batch.prompts):
        response = batch.response(i).tolist()
        sequence = [*prompt.tolist(), *response]
        for k in range(len(response)):
            index = int(layout.predicts[starts[i] + k])
            assert int(layout.positions[index]) == len(prompt) + k - 1
            assert sequence_before(layout, index) == sequence[: len(prompt) + k]
        for k in range(len(response) if keep_last else 0):
            assert sequence_before(layout, int(layout.responses[starts[i] + k])) == sequence[: len(prompt) + k + 1]
        kept = len(sequence) if keep_last else max(len(prompt), len(sequence) - 1)
        pasts += [tuple(sequence[:end]) for end in range(1, kept + 1)]
    assert layout.longest == max(map(len, pasts))
    assert keep_last or len(layout.responses) == 0
    if share_prompts:  # a little that could be spared may stay
        assert len(set(pasts)) <= len(layout.tokens) <= len(set(pasts)) / 0.98
    else:
        assert len(layout.tokens) == len(pasts)


def test_equal_lengths_need_no_rearranging() -> None:
    batch = batch_of([(4, 5), (7, 5), (4, 5), (7, 5)])
    layout = make_layout(batch, share_prompts=True)
    assert layout.rows is None
    assert layout.places is None
    assert [(call.size, call.width) for call in layout.calls] == [(1, 4), (1, 7), (2, 5), (2, 5)]


def test_a_call_takes_only_segments_that_fill_most_of_it() -> None:
    layout = make_layout(batch_of([(1, 99), (1, 79), (1, 9), (1, 8)]), share_prompts=False)
    assert sorted((call.size, call.width) for call in layout.calls) == [(2, 10), (2, 100)]


def test_responses_see_their_prompt_and_themselves() -> None:
    layout = make_layout(batch_of([(3, 2), (3, 2)]), share_prompts=True)
    visible = layout.calls[1].visible
    assert visible is not None
    assert visible.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_what_segments_begin_with_alike_is_one_token_of_the_stream() -> None:
    prompts = ([1, 2, 3], [1, 2, 4], [1, 2, 4])
    batch = Batch.from_trajectories(
        [make_trajectory(4, group=i, seed=min(i, 1), prompt=prompt) for i, prompt in enumerate(prompts)]
    )
    layout = make_layout(batch, share_prompts=True)
    assert len(layout.tokens) == (3 + 4) + (1 + 4)  # the second shares two tokens with the first, the third is it
    assert torch.equal(*layout.predicts.view(3, 4)[1:])
    assert layout.rows is not None
    assert len(layout.rows) == sum(call.size * call.width for call in layout.calls)


def test_what_little_could_be_merged_stays_as_it_is() -> None:
    batch = Batch.from_trajectories(
        [make_trajectory(60, group=i, seed=i, prompt=[9, i + 1]) for i in range(2)]  # one token of 124
    )
    assert make_layout(batch, share_prompts=True).again is None


def test_an_empty_prompt_is_refused() -> None:
    batch = Batch.from_trajectories([make_trajectory(2, prompt=[])])
    with pytest.raises(ValueError, match="empty prompt"):
        make_layout(batch, share_prompts=True)
