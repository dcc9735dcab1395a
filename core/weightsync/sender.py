"""The trainer's end of a weight sync: chunks sent from a thread, and sent again to receivers that ask for it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollstock.errors import RunError
from rollstock.interfaces.transport import Transport
from rollstock.metrics import Metric, Metrics
from rollstock.weightsync.cargo import Cargo, Table, table_of, tensors_of
from rollstock.weightsync.chunks import bytes_of, checksum, cut, memory_of
from rollstock.weightsync.wire import Head, Kind, read_head

logger = logging.getLogger(__name__)

WINDOW = 4
"""Chunks that may be on their way to a receiver; what is behind it waits, so that memory stays bounded."""

TRY_S = 1.0
"""How long one attempt to send may take before the sender looks whether anybody still wants it."""

WAIT_S, REST_S = 0.05, 0.005
"""How long the sender listens before it looks whether it is over: while chunks are on their way, and after the last."""


@dataclass(frozen=True)
class Offer:
    """What receivers are told of a sync, by the executor: what comes, and where to ask for it."""

    version: int
    key: bytes
    table: Table
    chunk_bytes: int
    address: str
    inboxes: tuple[str, ...]


@dataclass
class _Receiver:
    """How far one receiver is: the next chunk to send, and how many it has taken."""

    address: str
    next: int = 0
    taken: int = 0


class WeightSender:
    """Sends one cargo at a time, from a thread of its own: receivers may live in this very process."""

    def __init__(self, transport: Transport[Any], chunk_bytes: int) -> None:
        self._transport = transport
        self._chunk_bytes = chunk_bytes
        self._address = transport.bind("replies")
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._num_resent = 0
        self._num_bytes = 0

    def offer(self, cargo: Cargo, version: int, inboxes: Sequence[str]) -> Offer:
        """Begin to send; an earlier cargo is not sent any further. The tensors must not change before `finish`."""
        self._stop()
        offer = Offer(
            version=version,
            key=os.urandom(16),
            table=table_of(cargo),
            chunk_bytes=self._chunk_bytes,
            address=self._address,
            inboxes=tuple(inboxes),
        )
        self._over.clear()
        self._error, self._num_resent, self._num_bytes = None, 0, 0
        memory = [memory_of(tensor) for _, tensor in tensors_of(cargo)]
        self._thread = threading.Thread(target=self._run, args=(offer, memory), name="weight-sender", daemon=True)
        self._thread.start()
        return offer

    def finish(self) -> Metrics:
        """End the sync, which every receiver has said is done. Raises RunError if it could not be."""
        self._stop()
        if self._error is not None:
            raise RunError(f"the weights could not be sent: {self._error}") from self._error
        return {
            "sync/bytes": Metric(self._num_bytes, 1.0, "sum"),
            "sync/num_resent": Metric(self._num_resent, 1.0, "sum"),
        }

    def close(self) -> None:
        """Stop sending, and close the transport."""
        self._stop()
        self._transport.close()

    def _stop(self) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def _run(self, offer: Offer, memory: Sequence[Any]) -> None:
        """What the thread does. An error is told to the receivers, who would wait for nothing, and to `finish`."""
        try:
            _Sync(self, offer, memory).serve(self._over)
        except Exception as error:  # whatever a transport raises
            logger.exception("weight sync %d stopped", offer.version)
            self._error = error
            reason = str(error).encode()
            head = Head(Kind.FAILED, offer.key, offer.version, checksum=checksum([reason]))
            with contextlib.suppress(Exception):  # the same that failed before
                self._transport.broadcast(offer.inboxes, [head.pack(), reason], timeout=TRY_S)

    def send(self, addresses: Sequence[str], message: Sequence[Any]) -> dict[str, OSError]:
        """Send to several, and count the bytes as the transport does, where it does; returns who did not get it."""
        before = self._transport.statistics().get("bytes_sent")
        failed = dict(self._transport.broadcast(addresses, message, timeout=TRY_S))
        if before is not None:
            self._num_bytes += self._transport.statistics()["bytes_sent"] - before
        else:
            self._num_bytes += sum(map(len, message)) * (len(addresses) - len(failed))
        return failed

    def hear(self, seconds: float) -> list[memoryview] | None:
        """The next message of a receiver, if there is one in so many seconds."""
        try:
            return self._transport.receive("replies", timeout=seconds)
        except TimeoutError:
            return None

    def count_resent(self) -> None:
        """One more chunk is sent again."""
        self._num_resent += 1


class _Sync:
    """One sync: which receiver is how far.

    Receivers that are equally far are sent a chunk together, when all of them have room for it, so that a transport
    that can will write it once.
    """

    def __init__(self, sender: WeightSender, offer: Offer, memory: Sequence[Any]) -> None:
        self._sender = sender
        self._offer = offer
        self._memory = memory
        self._chunks = cut([entry.num_bytes for entry in offer.table.entries], offer.chunk_bytes)
        self._checksums: dict[int, int] = {}
        self._receivers = {rank: _Receiver(address) for rank, address in enumerate(offer.inboxes)}

    def serve(self, over: threading.Event) -> None:
        """Send, and answer, until it is over."""
        while not over.is_set():
            sent = self._send_next()
            done = all(receiver.taken == len(self._chunks) for receiver in self._receivers.values())
            message = self._sender.hear(0.0 if sent else REST_S if done else WAIT_S)
            while message is not None:
                self._answer(message)
                message = self._sender.hear(0.0)

    def _send_next(self) -> bool:
        """Send one more chunk to each party of receivers that has room; False if none has."""
        sent = False
        for number in sorted({receiver.next for receiver in self._receivers.values()} - {len(self._chunks)}):
            party = {rank: one for rank, one in self._receivers.items() if one.next == number}
            if all(one.next - one.taken < WINDOW for one in party.values()):
                for rank in self._send(number, party):
                    party[rank].next += 1
                sent = True
        return sent

    def _send(self, number: int, party: dict[int, _Receiver]) -> list[int]:
        """Send a chunk; returns the ranks of those that got it. Those that are gone are left out from now on."""
        buffers = bytes_of(self._memory, self._chunks[number])
        if number not in self._checksums:
            self._checksums[number] = checksum(buffers)
        head = Head(Kind.CHUNK, self._offer.key, self._offer.version, chunk=number, checksum=self._checksums[number])
        failed = self._sender.send([one.address for one in party.values()], [head.pack(), *buffers])
        for rank, one in party.items():
            error = failed.get(one.address)
            if error is not None and not isinstance(error, TimeoutError):
                logger.warning("rollout worker %d gets no weights any more: %s", rank, error)
                del self._receivers[rank]
        return [rank for rank, one in party.items() if one.address not in failed]

    def _answer(self, message: Sequence[memoryview]) -> None:
        """Do what a receiver asks for; what is damaged, or of another sync, it will say again if it matters."""
        head = read_head(message)
        if head is None or head.key != self._offer.key or checksum(message[1:]) != head.checksum:
            return
        if head.kind is Kind.JOIN:
            self._receivers[head.rank] = _Receiver(bytes(message[1]).decode())
        receiver = self._receivers.get(head.rank)
        if receiver is None:
            return
        if head.kind is Kind.TAKEN:
            receiver.taken = max(receiver.taken, head.chunk + 1)
        elif head.kind is Kind.AGAIN:
            receiver.taken = max(receiver.taken, head.chunk)
            if head.chunk < receiver.next:
                self._sender.count_resent()
                self._send(head.chunk, {head.rank: receiver})
