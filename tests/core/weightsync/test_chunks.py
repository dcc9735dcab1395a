"""Both ends cut alike, chunks hold everything once, and a checksum covers every bit."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollstock.weightsync.chunks import bytes_of, checksum, cut, memory_of

SIZES = st.lists(st.integers(0, 50), max_size=20)


@given(SIZES, st.integers(1, 20))
def test_every_byte_is_in_one_chunk_in_order(sizes: list[int], chunk_bytes: int) -> None:
    chunks = cut(sizes, chunk_bytes)
    assert all(chunks)
    assert all(sum(piece.num_bytes for piece in chunk) <= chunk_bytes for chunk in chunks)
    places = [(piece.tensor, place) for chunk in chunks for piece in chunk for place in range(piece.start, piece.stop)]
    assert places == [(tensor, place) for tensor, size in enumerate(sizes) for place in range(size)]


@given(SIZES, st.integers(1, 20))
def test_only_what_is_larger_than_a_chunk_is_cut(sizes: list[int], chunk_bytes: int) -> None:
    pieces = [piece.tensor for chunk in cut(sizes, chunk_bytes) for piece in chunk]
    assert all(pieces.count(tensor) == -(-size // chunk_bytes) for tensor, size in enumerate(sizes))


def test_the_bytes_of_a_chunk_are_those_of_its_tensors() -> None:
    tensors = [torch.arange(5, dtype=torch.int16), torch.randn(3, 2).t(), torch.tensor([True, False])]
    memory = [memory_of(tensor) for tensor in tensors]
    chunks = cut([tensor.nbytes for tensor in tensors], 8)
    whole = b"".join(bytes(buffer) for chunk in chunks for buffer in bytes_of(memory, chunk))
    assert whole == b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)


@given(st.binary(min_size=1, max_size=40), st.data())
def test_a_checksum_is_that_of_the_whole_and_changes_with_every_bit(whole: bytes, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(whole)))
    right = checksum([whole])
    assert checksum([whole[:first], memoryview(whole[first:])]) == right
    place, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    spoiled = bytearray(whole)
    spoiled[place] ^= 1 << bit
    assert checksum([spoiled]) != right
