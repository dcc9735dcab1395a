"""Tokens of sequences that begin alike are one, and no others are."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollstock.backends.prefix_tree import first_places, tree_nodes

TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 2**40]), max_size=6)


@given(st.lists(TOKENS, max_size=8))
def test_two_tokens_have_one_node_where_all_up_to_them_is_equal(sequences: list[list[int]]) -> None:
    nodes = tree_nodes([torch.tensor(sequence, dtype=torch.int64) for sequence in sequences])
    of_past: dict[tuple[int, ...], int] = {}
    for sequence, found in zip(sequences, nodes, strict=True):
        assert len(found) == len(sequence)
        for end, node in enumerate(found.tolist(), start=1):
            assert of_past.setdefault(tuple(sequence[:end]), node) == node
    assert sorted(of_past.values()) == list(range(len(of_past)))


@given(st.lists(st.integers(0, 2**50), max_size=12))
def test_first_places_take_every_kind_once_in_the_order_of_appearance(values: list[int]) -> None:
    nodes = torch.tensor(values, dtype=torch.int64)
    first, index = first_places(nodes)
    assert nodes[first].tolist() == list(dict.fromkeys(values))
    assert nodes[first][index].tolist() == values
    assert first.tolist() == sorted(first.tolist())
