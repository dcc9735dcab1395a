"""Weights arrive whole at every receiver, whatever happens to messages on the way, or the sync says why not."""

import threading
import time
from typing import Any

import pytest
import torch

from rollstock import RunError
from rollstock.weightsync.cargo import Cargo, unpacked
from rollstock.weightsync.receiver import WeightReceiver
from rollstock.weightsync.wire import Head, Kind, read_head

from .conftest import Ends, taken


def assert_arrived(found: list[dict[str, torch.Tensor]], cargo: Cargo) -> None:
    for weights in found:
        assert weights.keys() == {name for name, _ in cargo.weights}
        for name, tensor in cargo.weights:
            assert weights[name].dtype == tensor.dtype
            assert torch.equal(weights[name], tensor), name


def kind_of(message: list[bytes]) -> Kind | None:
    head = read_head(message)
    return None if head is None else head.kind


def test_every_receiver_gets_every_weight_and_one_of_two_names_is_sent_once(ends: Ends, cargo: Cargo) -> None:
    ends.start(2)
    assert_arrived(ends.sync(cargo), cargo)
    apart = Cargo([(name, tensor.clone()) for name, tensor in cargo.weights])
    once = ends.metrics["sync/bytes"]
    assert_arrived(ends.sync(apart, 2), cargo)
    share = 1 if ends.name == "shm" else 2
    assert ends.metrics["sync/bytes"] - once >= share * cargo.weights[0][1].nbytes
    assert cargo.num_bytes * share <= once < cargo.num_bytes * share * 1.2
    assert ends.metrics["sync/num_resent"] == 0


def test_versions_follow_each_other(ends: Ends, cargo: Cargo) -> None:
    ends.start(2)
    for version in range(1, 6):
        for _, tensor in cargo.weights[:3]:
            tensor.mul_(1.5)
        assert_arrived(ends.sync(cargo, version), cargo)


@pytest.mark.parametrize("place", ["payload", "head"])
def test_a_flipped_bit_is_noticed_and_the_chunk_sent_again(ends: Ends, cargo: Cargo, place: str) -> None:
    flipped: set[tuple[str, int]] = set()

    def flip(address: str, message: list[bytes]) -> list[list[bytes]]:
        head = read_head(message)
        assert head is not None
        if head.kind is not Kind.CHUNK or (address, head.chunk) in flipped or head.chunk % 3:
            return [message]
        flipped.add((address, head.chunk))
        target = 0 if place == "head" else len(message) - 1
        spoiled = bytearray(message[target])
        spoiled[len(spoiled) // 2] ^= 16
        return [[*message[:target], bytes(spoiled), *message[target + 1 :]]]

    ends.start(2, harm=flip)
    assert_arrived(ends.sync(cargo), cargo)
    assert len(flipped) > 4
    assert ends.metrics["sync/num_resent"] >= len(flipped)
    assert sum(receiver.num_damaged for receiver in ends.receivers) == len(flipped)


def test_a_chunk_that_is_always_damaged_ends_the_sync_with_its_number(ends: Ends, cargo: Cargo) -> None:
    def flip(address: str, message: list[bytes]) -> list[list[bytes]]:
        head = read_head(message)
        assert head is not None
        if head.kind is Kind.CHUNK and head.chunk == 2:
            message[-1] = bytes([message[-1][0] ^ 1]) + message[-1][1:]
        return [message]

    ends.start(1, harm=flip, max_resends=2)
    with pytest.raises(RunError, match=r"chunk 2 of weights 7 arrived damaged 3 times; weight_sync.max_resends is 2"):
        ends.sync(cargo, 7)


def test_lost_and_doubled_messages_make_no_difference(ends: Ends, cargo: Cargo) -> None:
    lost: set[tuple[str, int]] = set()

    def lose(address: str, message: list[bytes]) -> list[list[bytes]]:
        head = read_head(message)
        assert head is not None
        if head.kind is not Kind.CHUNK or (address, head.chunk) in lost:
            return [message, message]
        if head.chunk % 4 == 1:
            lost.add((address, head.chunk))
            return []
        return [message]

    ends.start(2, harm=lose)
    assert_arrived(ends.sync(cargo), cargo)
    assert len(lost) > 2
    assert ends.metrics["sync/num_resent"] >= len(lost)


def test_messages_that_come_late_and_in_another_order_are_put_in_order(ends: Ends, cargo: Cargo) -> None:
    held: dict[str, list[list[bytes]]] = {}

    def hold(address: str, message: list[bytes]) -> list[list[bytes]]:
        waiting = held.setdefault(address, [])
        if kind_of(message) is Kind.CHUNK and len(waiting) < 1:
            waiting.append(message)
            return []
        time.sleep(0.01)
        return [message, *[waiting.pop() for _ in list(waiting)]]

    ends.start(2, harm=hold)
    assert_arrived(ends.sync(cargo), cargo)


def test_what_nobody_sends_ends_after_the_time_limit(ends: Ends, cargo: Cargo) -> None:
    ends.start(1, harm=lambda address, message: [], timeout_s=0.5)
    with pytest.raises(
        RunError, match=r"chunk 0 of weights 1 did not come: nothing came from .* \(weight_sync.timeout"
    ):
        ends.sync(cargo)


def test_a_sender_that_fails_says_so(ends: Ends, cargo: Cargo) -> None:
    def fail(address: str, message: list[bytes]) -> list[list[bytes]]:
        if kind_of(message) is Kind.CHUNK:
            raise RuntimeError("the disk is on fire")
        return [message]

    ends.start(1, harm=fail)
    offer = ends.offer(cargo, 1)
    with pytest.raises(RunError, match="the sender of weights 1 gave up: the disk is on fire"):
        taken(ends.receivers[0], offer)
    with pytest.raises(RunError, match="the weights could not be sent: the disk is on fire"):
        ends.sender.finish()


def test_the_messages_of_an_earlier_sync_and_of_strangers_are_not_looked_at(ends: Ends, cargo: Cargo) -> None:
    ends.start(1, max_resends=1)  # which only what may be a head of ours uses up
    stranger = ends.transport()
    ends.offer(Cargo([(name, torch.ones_like(tensor)) for name, tensor in cargo.weights]), 1)  # nobody takes it
    time.sleep(0.1)
    bomb = b"cposix\nsystem\n(S'exit 1'\ntR."
    forged = Head(Kind.CHUNK, b"0" * 16, 1).pack()
    for message in ([b"hello"], [], [bomb], [forged, b"x"], [forged[:-1] + b"?", bomb]):
        stranger.send(ends.receivers[0].address, message, timeout=5.0)
    assert_arrived(ends.sync(cargo, 2), cargo)
    stranger.close()


def test_a_worker_that_stands_in_for_a_lost_one_asks_for_everything(ends: Ends, cargo: Cargo) -> None:
    ends.start(2)
    offer = ends.offer(cargo, 1)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(taken(ends.receivers[0], offer)))
    other.start()
    lost = ends.receivers[1].receive(offer)
    next(lost)  # has read a part when it is lost
    lost.close()
    ends.receivers.pop().close()
    stand_in = WeightReceiver(ends.transport(), 1, max_resends=1, timeout_s=20.0, patience_s=0.2)
    found.append(taken(stand_in, offer))
    other.join(20)
    assert_arrived(found, cargo)
    assert len(found) == 2
    stand_in.close()


def test_adapters_travel_as_factors_and_merge_to_the_bit(ends: Ends, cargo: Cargo, adapters: Any) -> None:
    ends.start(1)
    offer = ends.offer(Cargo([], adapters), 3)
    assert [entry.names for entry in offer.table.entries] == [("turned",), ("turned",)]
    found = unpacked(offer.table, ends.receivers[0].receive(offer))
    ends.sender.finish()
    weight = dict(cargo.weights)["turned"]
    assert found.weights == []
    assert torch.equal(found.adapters[0][1].merge(weight), adapters[0][1].merge(weight))


def test_a_cargo_without_weights_is_over_at_once(ends: Ends) -> None:
    ends.start(2)
    nothing = Cargo([("nothing", torch.zeros(0, 3))])
    assert_arrived(ends.sync(nothing), nothing)
