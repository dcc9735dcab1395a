"""The worker's loop, driven over a socket in this process."""

import pickle
import random
import socket
import threading

import pytest

from rollstock.errors import ConfigError
from rollstock.sandbox.process import Output, describe_exit
from rollstock.sandbox.protocol import Answer, Ask, Build, FrameReader, Ready, frame
from rollstock.sandbox.worker import announce, build, call, describe, serve


class OddError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Refused:
    """A factory whose very unpickling refuses."""

    def __reduce__(self):
        return refuse, ()


def refuse():
    raise ConfigError("options: no such field")


def test_serves_until_the_connection_closes():
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    ours.sendall(frame(Build(pickle.dumps(random.Random))) + frame(Ask(7, pickle.dumps(()))))
    reader, messages = FrameReader(), []
    while len(messages) < 2:
        messages += reader.feed(ours.recv(4096))
    ours.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
    ready, answer = messages
    assert ready == Ready()
    assert answer.number == 7
    assert "not callable" in answer.error
    announce("a reward, in a process whose worker has ended")


def test_a_user_error_keeps_its_words():
    handler, ready = build(pickle.dumps(Refused()))
    assert handler is None
    assert ready.users_fault
    assert ready.error == "options: no such field"


def test_a_seeded_call_draws_the_same_numbers():
    asks = [Ask(0, pickle.dumps(None), seed=5), Ask(1, pickle.dumps(None), seed=5)]
    first, second = (pickle.loads(call(lambda _: random.random(), ask).value) for ask in asks)
    assert first == second


def test_an_exception_without_a_text_is_still_described():
    assert describe(OddError()) == "OddError"
    assert describe(ValueError("first\nsecond")) == "ValueError: first"


def test_an_answer_carries_value_and_duration():
    answer = call(lambda x: x + 1, Ask(3, pickle.dumps(4)))
    assert isinstance(answer, Answer)
    assert pickle.loads(answer.value) == 5
    assert answer.seconds >= 0


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (-9, "signal SIGKILL"), (-250, "signal 250"), (None, "it hung up")]
)
def test_exit_codes_in_words(code, words):
    assert describe_exit(code) == words


def test_output_keeps_the_beginning():
    output = Output()
    output.add(b"a" * 20_000)
    output.add(b"b")
    assert output.take() == "a" * 16_384 + "\n... (3617 more bytes)"
    assert output.take() == ""
