"""A fingerprint covers every bit, and only that."""

import pytest
import torch

from rollstock import fingerprint


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return {
        "a": torch.randn(300, 50),
        "b": torch.randn(5),
        "c": torch.randn(20, 3).to(torch.bfloat16),
        "d": torch.tensor(2),
    }


def test_order_and_memory_layout_do_not_matter(weights):
    turned = {name: weights[name] for name in reversed(weights)}
    turned["a"] = weights["a"].t().contiguous().t()
    assert fingerprint(turned.items()) == fingerprint(weights.items())


@pytest.mark.parametrize("place", [0, 1, 4098, 4099, 14999])
def test_one_changed_bit_shows(weights, place):
    before = fingerprint(weights.items())
    bits = weights["a"].view(-1).view(torch.int32)
    bits[place] ^= 1
    assert fingerprint(weights.items()) != before


def test_swapped_values_show_even_a_lane_apart(weights):
    before = fingerprint(weights.items())
    flat = weights["a"].view(-1)
    flat[[0, 4099]] = flat[[4099, 0]]
    assert fingerprint(weights.items()) != before


def test_names_shapes_and_dtypes_count(weights):
    before = fingerprint(weights.items())
    assert fingerprint({**weights, "b": weights["b"].reshape(5, 1)}.items()) != before
    assert fingerprint({**weights, "b": weights["b"].double()}.items()) != before
    assert fingerprint({("z" if n == "b" else n): w for n, w in weights.items()}.items()) != before


def test_memory_that_words_do_not_begin_at_gives_the_same(weights):
    whole = torch.randn(4099 * 8 + 5)
    shifted = torch.cat([torch.zeros(3), whole])[3:]
    assert fingerprint([("w", shifted)]) == fingerprint([("w", whole.clone())])


@pytest.mark.parametrize("place", [0, 7 * 4099 * 2, 4099 * 2 * 33 + 7])
def test_a_change_in_any_block_of_rows_shows(place):
    before = torch.randn(4099 * 2 * 33 + 11)
    after = before.clone()
    after[place] += 1
    assert fingerprint([("w", before)]) != fingerprint([("w", after)])
