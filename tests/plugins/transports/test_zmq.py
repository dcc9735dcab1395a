"""ZeroMQ listens to this machine alone unless told otherwise, waits with a limit, and unpickles nothing."""

import pickle
import time
from typing import Any

import pytest

from rollstock import ConfigError

from .conftest import new_sockets

pytest.importorskip("zmq")
LOOPBACK = {("tcp", "0100007F")}


def test_it_listens_on_loopback_alone(make: Any) -> None:
    with new_sockets() as found:
        address = make("zmq").bind("inbox")
    assert address.startswith("tcp://127.0.0.1:")
    assert found == LOOPBACK


def test_auto_is_the_address_that_others_reach_this_machine_by(make: Any) -> None:
    receiver, sender = make("zmq", host="auto"), make("zmq")
    address = receiver.bind("inbox")
    assert "0.0.0.0" not in address
    sender.send(address, [b"x"], timeout=30)
    assert bytes(receiver.receive("inbox", timeout=30)[0]) == b"x"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "localhost", ""])
def test_hosts_that_are_everybody_or_nobody_are_refused(make: Any, host: str) -> None:
    with pytest.raises(ConfigError, match="host"):
        make("zmq", host=host)


def test_large_frames_come_from_several_places(make: Any) -> None:
    sender, receiver = make("zmq"), make("zmq")
    addresses = [receiver.bind(name) for name in ("a", "b")]
    payload = bytes(range(256)) * 1000
    assert sender.broadcast(addresses, [b"head", payload, payload[:-1]], timeout=60) == {}
    for name in ("a", "b"):
        assert [bytes(buffer) for buffer in receiver.receive(name, timeout=60)] == [b"head", payload, payload[:-1]]
    assert sender.statistics()["bytes_sent"] == 2 * (4 + 2 * len(payload) - 1)


def test_nobody_there_is_a_timeout(make: Any) -> None:
    receiver, sender = make("zmq"), make("zmq")
    address = receiver.bind("inbox")
    receiver.close()
    with pytest.raises(TimeoutError, match=r"took no message within 0.1 s"):
        sender.send(address, [b"x"], timeout=0.1)


def test_a_killed_receiver_is_a_timeout_and_others_go_on(make: Any, other: Any) -> None:
    sender, receiver, here = make("zmq"), other("zmq"), make("zmq")
    sender.send(receiver.address, [b"x" * 100_000], timeout=60)
    assert receiver.take() == 100_000
    receiver.kill()
    address = here.bind("inbox")
    deadline = time.monotonic() + 60
    failed: dict[str, OSError] = {}
    while (
        receiver.address not in failed and time.monotonic() < deadline
    ):  # the kernel takes its time to say that it is gone
        failed = dict(sender.broadcast([receiver.address, address], [b"y" * 100_000], timeout=0.5))
        assert len(here.receive("inbox", timeout=60)[0]) == 100_000
    assert isinstance(failed[receiver.address], TimeoutError)


def test_what_does_not_begin_with_the_mark_is_thrown_away(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    import zmq

    receiver, sender = make("zmq"), make("zmq")
    address = receiver.bind("inbox")
    context = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.connect(address)
    stranger.send_multipart([pickle.dumps(print), b"more"])
    deadline = time.monotonic() + 60
    while "not of rollstock" not in caplog.text and time.monotonic() < deadline:
        with pytest.raises(TimeoutError):
            receiver.receive("inbox", timeout=0.1)
    sender.send(address, [b"right"], timeout=30)
    assert bytes(receiver.receive("inbox", timeout=30)[0]) == b"right"
    assert "not of rollstock" in caplog.text
    stranger.close(linger=0)
    context.term()


@pytest.mark.parametrize("name", ["zmq", "shm"])
def test_nothing_is_pickled_on_the_way(make: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was pickled")

    for function in ("dumps", "dump", "loads", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, function, refuse)
    sender, receiver = make(name), make(name)
    bomb = b"cposix\nsystem\n(S'exit 1'\ntR."
    sender.send(receiver.bind("inbox"), [bomb, bomb * 10_000], timeout=30)
    assert bytes(receiver.receive("inbox", timeout=30)[0]) == bomb
