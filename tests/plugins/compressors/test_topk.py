"""The largest numbers and the code of their places, against numbers computed by hand and plain sorting."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstock.plugins.compressors import _indices
from rollstock.plugins.compressors._indices import decode_indices, encode_indices, largest
from rollstock.plugins.compressors.topk import TopK, TopKConfig


def test_the_largest_are_sent_and_the_rest_is_kept() -> None:
    compressor = TopK(TopKConfig(count=2))
    first = torch.zeros(64)
    first[[1, 7, 30, 63]] = torch.tensor([1.0, -4.0, 3.0, 2.5])
    sent = compressor.decompress(compressor.compress(first, key="w"))
    assert torch.nonzero(sent).flatten().tolist() == [7, 30]
    assert sent[[7, 30]].tolist() == [-4.0, 3.0]
    # The second round owes 1 and 2.5, and is given 2 and 1 at the same places and 0.5 elsewhere.
    second = torch.full((64,), 0.5)
    second[[1, 63]] = torch.tensor([2.0, 1.0])
    sent = compressor.decompress(compressor.compress(second, key="w"))
    assert torch.nonzero(sent).flatten().tolist() == [1, 63]
    assert sent[[1, 63]].tolist() == [3.0, 3.5]


@pytest.mark.parametrize(
    ("options", "size", "sent"),
    [
        ({}, 1000, 100),
        ({}, 3, 1),
        ({"share": 0.25}, 10, 2),
        ({"share": 1.0}, 10, 10),
        ({"count": 5}, 1000, 5),
        ({"count": 5}, 3, 3),
        ({"count": 5, "share": 0.5}, 1000, 5),
    ],
)
def test_how_many_are_sent(options: dict[str, float], size: int, sent: int) -> None:
    assert TopKConfig(**options).num_sent(size) == sent


def test_numbers_are_sent_in_the_type_of_the_tensor() -> None:
    payload = TopK().compress(torch.randn(5000).to(torch.bfloat16), key="w")
    assert payload.tensors["numbers"].dtype == torch.bfloat16
    assert payload.tensors["numbers"].numel() == 500


def test_the_code_of_indices_is_the_one_computed_by_hand() -> None:
    # 3 of 32: 3 low bits each. 2 = 0|010, 13 = 1|101, 31 = 3|111; bits stand from the lowest up. The high parts 0, 1, 3
    # go to the places 0 + 0, 1 + 1 and 3 + 2 of 3 + 3 + 1.
    encoded = encode_indices(torch.tensor([2, 13, 31]), 32)
    assert encoded["high"].tolist() == [0b0100101]
    assert encoded["low"].tolist() == [0b11101010, 0b1]
    assert decode_indices(encoded, 32, 3).tolist() == [2, 13, 31]


def test_many_indices_are_one_bit_for_each_place() -> None:
    encoded = encode_indices(torch.tensor([0, 1, 3, 9]), 10)
    assert {name: part.tolist() for name, part in encoded.items()} == {"bitmap": [0b00001011, 0b10]}


@settings(max_examples=60)
@given(data=st.data(), size=st.integers(1, 3000))
def test_indices_come_back(data: st.DataObject, size: int) -> None:
    count = data.draw(st.integers(1, size))
    seed = data.draw(st.integers(0, 999))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    indices = order[:count].sort().values
    encoded = encode_indices(indices, size)
    assert torch.equal(decode_indices(encoded, size, count), indices)
    assert all(part.dtype == torch.uint8 for part in encoded.values())
    assert sum(part.numel() for part in encoded.values()) <= 4 * count + 1


@pytest.mark.parametrize("places", [[0], [2**40 - 1], [0, 1, 2], [5, 2**33, 2**40 - 1]])
def test_indices_beyond_32_bits_come_back(places: list[int]) -> None:
    encoded = encode_indices(torch.tensor(places), 2**40)
    assert decode_indices(encoded, 2**40, len(places)).tolist() == places
    assert sum(part.numel() for part in encoded.values()) <= 6 * len(places) + 1


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.2])
def test_the_code_is_within_two_thirds_of_a_bit_of_the_least_possible(share: float) -> None:
    size = 200_000
    count = round(share * size)
    indices = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:count].sort().values
    bits = 8 * sum(part.numel() for part in encode_indices(indices, size).values()) / count
    least = (math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)) / math.log(2) / count
    assert least <= bits <= least + 0.67


@pytest.mark.parametrize("count", [1, 10, 9_000, 70_000, 99_999, 100_000])
@pytest.mark.parametrize("spread", ["normal", "few values", "mostly zero", "tiny", "equal"])
def test_a_histogram_finds_what_sorting_finds(count: int, spread: str) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(count))
    match spread:
        case "few values":
            values = values.round()
        case "mostly zero":
            values = values * (values > 2)
        case "tiny":
            values = values * 1e-42
        case "equal":
            values = torch.ones_like(values)
    found = largest(values, count)
    assert values.numel() > _indices._HISTOGRAM
    assert found.numel() == count
    assert (found[1:] > found[:-1]).all()
    assert torch.equal(values.abs()[found].sort().values, values.abs().sort().values[-count:])


def test_what_equal_numbers_leave_is_sent_in_turn() -> None:
    compressor = TopK(TopKConfig(share=0.25))
    total = sum(compressor.decompress(compressor.compress(torch.ones(400), key="w")) for _ in range(16))
    assert ((total >= 10) & (total <= 16)).all()  # type: ignore[operator, union-attr]
