"""Messages survive any cutting of the stream."""

from hypothesis import given
from hypothesis import strategies as st

from rollstock.sandbox.protocol import Answer, Ask, FrameReader, frame


@given(st.lists(st.binary(max_size=40), max_size=5), st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_frames_come_back_whole_however_the_stream_is_cut(values, sizes):
    messages = [Answer(number, value=value) for number, value in enumerate(values)]
    stream = b"".join(frame(message) for message in messages)
    reader, got, position = FrameReader(), [], 0
    while position < len(stream):
        size = sizes[position % len(sizes)]
        got += reader.feed(stream[position : position + size])
        position += size
    assert got == messages


def test_half_a_frame_is_no_message():
    data = frame(Ask(1, b"request", seed=3))
    reader = FrameReader()
    assert list(reader.feed(data[:-1])) == []
    assert list(reader.feed(data[-1:])) == [Ask(1, b"request", seed=3)]
