"""Shared memory is written once, used again, never named, and free again whoever is killed."""

import mmap
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstock import ConfigError, RunError
from rollstock.plugins.transports._blocks import GRAIN, Block, message_size, read_message, write_message

from .conftest import new_sockets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the transport is for Linux")

LARGE = 1 << 20


def test_a_message_for_several_is_written_once(make: Any) -> None:
    sender, receiver = make("shm"), make("shm")
    addresses = [receiver.bind(name) for name in ("a", "b", "c")]
    assert sender.broadcast(addresses, [b"x" * LARGE]) == {}
    found = [receiver.receive(name)[0] for name in ("a", "b", "c")]
    assert [bytes(buffer[:2]) for buffer in found] == [b"xx"] * 3
    assert len(sender._blocks) == 1
    assert sender.statistics() == {
        "bytes_sent": LARGE,
        "messages_sent": 3,
        "bytes_received": 0,
        "messages_received": 0,
    }


def test_blocks_are_used_again_when_the_last_view_is_gone(make: Any) -> None:
    sender, receiver = make("shm"), make("shm")
    address = receiver.bind("inbox")
    for value in range(20):
        sender.send(address, [bytes([value]) * LARGE, b"end"])
        found = receiver.receive("inbox")
        assert found[0][0] == value
        kept = found[0][10:20]
        del found
    assert bytes(kept) == bytes([19]) * 10
    assert len(sender._blocks) <= 2


def test_a_sender_waits_for_a_receiver_that_holds_every_block(make: Any) -> None:
    sender, receiver = make("shm", max_blocks=2), make("shm")
    address = receiver.bind("inbox")
    for _ in range(2):
        sender.send(address, [b"x" * LARGE])
    held = [receiver.receive("inbox") for _ in range(2)]
    with pytest.raises(TimeoutError, match="receivers hold all 2 blocks of shared memory"):
        sender.send(address, [b"y" * LARGE], timeout=0.1)
    held.pop()
    sender.send(address, [b"y" * LARGE], timeout=30.0)
    assert receiver.receive("inbox")[0][0] == ord("y")


def test_a_larger_message_takes_the_place_of_a_smaller_block(make: Any) -> None:
    sender, receiver = make("shm", max_blocks=1), make("shm")
    address = receiver.bind("inbox")
    for size in (LARGE, 3 * LARGE, 2 * LARGE):
        sender.send(address, [b"x" * size])
        assert len(receiver.receive("inbox")[0]) == size
    assert [block.size for block in sender._blocks] == [3 * LARGE + GRAIN]  # with room for the table of lengths


def test_received_memory_cannot_be_written_to(make: Any) -> None:
    sender, receiver = make("shm"), make("shm")
    sender.send(receiver.bind("inbox"), [b"x" * LARGE])
    assert receiver.receive("inbox")[0].readonly


def test_a_killed_receiver_holds_no_block_any_longer(make: Any, other: Any) -> None:
    sender, receiver = make("shm"), other("shm")
    sender.send(receiver.address, [b"x" * LARGE], timeout=60)
    assert receiver.take() == LARGE
    assert sender._blocks[0].readers
    receiver.kill()
    with pytest.raises(ConnectionError):
        sender.send(receiver.address, [b"y" * LARGE], timeout=60)
    assert not sender._blocks[0].readers


def test_what_a_killed_sender_has_sent_stays_until_it_is_let_go_of(make: Any, other: Any) -> None:
    names = set(os.listdir("/dev/shm"))
    receiver, sender = make("shm"), other("shm")
    sender.send(receiver.bind("inbox"), LARGE)
    found = receiver.receive("inbox", timeout=60)
    sender.kill()
    with pytest.raises(TimeoutError):
        receiver.receive("inbox", timeout=0.05)
    assert bytes(found[0]) == bytes([7]) * LARGE
    assert not [name for name in set(os.listdir("/dev/shm")) - names if "rollstock" in name]


def test_a_block_has_no_name_so_that_the_kernel_frees_it() -> None:
    for directory in ("/dev/shm", None):
        block = Block(0, 100, directory)
        assert os.fstat(block.descriptor).st_nlink == 0
        assert os.fstat(block.descriptor).st_size == GRAIN
        block.close()


def test_a_full_directory_is_a_message_with_the_ways_out(make: Any, tmp_path: Path) -> None:
    usage = os.statvfs("/dev/shm")
    too_much = usage.f_frsize * usage.f_blocks + GRAIN
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(too_much)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as sparse:
        whole = memoryview(sparse)
        sender, receiver = make("shm"), make("shm")
        address = receiver.bind("inbox")
        message = r"no room for a block of \d+ MiB: /dev/shm has \d+ MiB free of \d+.*--shm-size.*transport.directory"
        with pytest.raises(RunError, match=message):
            sender.send(address, [whole])
        whole.release()
    sender.send(address, [b"x" * LARGE])
    assert len(receiver.receive("inbox")[0]) == LARGE


def test_a_directory_that_is_not_there_is_named(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`directory` '.*none' is none that can be written"):
        make("shm", directory=str(tmp_path / "none"))
    (tmp_path / "none").mkdir()
    sender, receiver = make("shm", directory=str(tmp_path / "none")), make("shm")
    (tmp_path / "none").rmdir()
    with pytest.raises(RunError, match=r"cannot make a file in .*none: No such file"):
        sender.send(receiver.bind("inbox"), [b"x" * LARGE])


def test_nothing_is_reached_over_a_network(make: Any) -> None:
    with new_sockets() as found:
        make("shm").send(make("shm").bind("inbox"), [b"x"])
    assert found == set()


def test_addresses_of_nobody_are_refused(make: Any) -> None:
    sender = make("shm")
    for address in ("shm:rollstock-0-nobody", "tcp://127.0.0.1:1"):
        with pytest.raises(ConnectionError):
            sender.send(address, [b"x"])


def test_a_connection_that_breaks_the_protocol_is_ended_and_others_go_on(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import socket

    receiver, sender = make("shm"), make("shm")
    address = receiver.bind("inbox")
    for packet in (b"\x02" + bytes(20), b"\x01" + bytes(20) + b"\xff" * 8, b"?"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect("\0" + address.removeprefix("shm:"))
            stranger.send(packet)
            with pytest.raises(TimeoutError):
                receiver.receive("inbox", timeout=0.05)
    sender.send(address, [b"right"])
    assert bytes(receiver.receive("inbox")[0]) == b"right"
    assert "does not keep to the protocol" in caplog.text


@pytest.mark.parametrize("buffers", [[], [b""], [b"a", b"", b"bc" * 100]])
def test_a_message_in_memory_is_read_as_it_was_written(buffers: list[bytes]) -> None:
    import numpy as np

    memory = np.zeros(message_size(buffers), np.uint8)
    write_message(memory, buffers)
    assert [bytes(buffer) for buffer in read_message(memoryview(memory.tobytes()))] == buffers
