"""The head of a message comes back as it was, or not at all."""

import pytest

from rollstock.weightsync.wire import Head, Kind, read_head

HEAD = Head(Kind.AGAIN, b"k" * 16, version=2**40, chunk=7, rank=3, checksum=2**32 - 1)


def test_a_head_comes_back() -> None:
    assert read_head([memoryview(HEAD.pack()), b"more"]) == HEAD


def test_every_flipped_bit_is_noticed() -> None:
    packed = HEAD.pack()
    for place in range(8 * len(packed)):
        spoiled = bytearray(packed)
        spoiled[place // 8] ^= 1 << place % 8
        assert read_head([spoiled]) is None


@pytest.mark.parametrize("message", [[], [b""], [b"x" * 40], [b"x" * len(HEAD.pack())], [HEAD.pack() + b"x"]])
def test_what_is_no_head_is_none(message: list[bytes]) -> None:
    assert read_head(message) is None
