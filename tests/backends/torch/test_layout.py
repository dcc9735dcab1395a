"""Where tokens stand in a packed stream, and which attention calls cover it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollstock import Batch
from rollstock.backends.torch.layout import Layout, make_layout
from rollstock.testing import make_trajectory


def batch_of(rows: list[tuple[int, int]]) -> Batch:
    """Trajectories of (prompt length, response length); prompts of one length are equal."""
    return Batch.from_trajectories(
        [
            make_trajectory(length, group=width, seed=i, prompt=list(range(1, width + 1)))
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
    share_prompts=st.booleans(),
    keep_last=st.booleans(),
)
def test_every_response_token_is_predicted_from_its_own_past(
    rows: list[tuple[int, int]], share_prompts: bool, keep_last: bool
) -> None:
    batch = batch_of(rows)
    layout = make_layout(batch, share_prompts=share_prompts, keep_last=keep_last)
    starts = (torch.cumsum(batch.lengths, 0) - batch.lengths).tolist()
    for i, prompt in enumerate(batch.prompts):
        response = batch.response(i).tolist()
        for k in range(len(response)):
            index = int(layout.predicts[starts[i] + k])
            assert int(layout.positions[index]) == len(prompt) + k - 1
            assert sequence_before(layout, index) == [*prompt.tolist(), *response[:k]]
    left_out = 0 if keep_last else 1
    assert layout.longest == max(width + max(0, length - left_out) for width, length in rows)
    if not keep_last:
        whole = make_layout(batch, share_prompts=share_prompts)
        assert len(layout.tokens) == len(whole.tokens) - sum(length > 0 for _, length in rows)
        assert len(layout.responses) == 0


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


def test_an_empty_prompt_is_refused() -> None:
    batch = Batch.from_trajectories([make_trajectory(2, prompt=[])])
    with pytest.raises(ValueError, match="empty prompt"):
        make_layout(batch, share_prompts=True)
