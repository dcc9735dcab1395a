"""A generator's end of a weight sync: chunks checked as they come, asked for again if they must be, put together."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rollstock.errors import RunError
from rollstock.interfaces.transport import Transport
from rollstock.weightsync.cargo import Entry
from rollstock.weightsync.chunks import Piece, checksum, cut
from rollstock.weightsync.sender import Offer
from rollstock.weightsync.wire import Head, Kind, has_head, read_head

logger = logging.getLogger(__name__)


class WeightReceiver:
    """Receives the cargo of one offer after another.

    max_resends: how often a chunk that came damaged is asked for again; timeout_s: how long nothing may come at all;
    patience_s: seconds of silence after which a chunk counts as lost and is asked for, twice as many each time.
    """

    def __init__(
        self, transport: Transport[Any], rank: int, *, max_resends: int, timeout_s: float, patience_s: float = 2.0
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._max_resends = max_resends
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self.address = transport.bind("weights")
        self.num_damaged = 0

    def receive(self, offer: Offer) -> Iterator[tuple[Entry, Tensor]]:
        """The tensors of an offer, in order, in memory of their own.

        Nothing that the transport lends is held while more is waited for, since others may need it. Raises RunError if
        a chunk is damaged too often, if nothing comes for too long, or if the sender is gone or says that it failed.
        """
        self.num_damaged = 0
        if self.address not in offer.inboxes:  # a worker that stands in for a lost one
            self.say(offer, Kind.JOIN, text=self.address)
        pieces = self._pieces(offer)
        for entry in offer.table.entries:
            whole = torch.empty(entry.num_bytes, dtype=torch.uint8)
            num_read = 0
            while num_read < entry.num_bytes:
                num_read = _read(pieces, whole)
            yield entry, whole.view(entry.torch_dtype).reshape(entry.shape)
        next(pieces, None)  # says that the last chunk is taken
        self._drain()

    def _drain(self) -> None:
        """Throw away what was sent twice: unread, it would hold memory that a transport needs for other receivers."""
        with contextlib.suppress(TimeoutError):
            while True:
                self.hear(0.0)

    def _pieces(self, offer: Offer) -> Iterator[tuple[Piece, memoryview]]:
        """All pieces in order; a chunk is said to be taken when the piece behind it is asked for."""
        chunks = _Chunks(self, offer)
        for number, chunk in enumerate(cut([entry.num_bytes for entry in offer.table.entries], offer.chunk_bytes)):
            yield from zip(chunk, chunks.take(number, chunk), strict=True)
            self.say(offer, Kind.TAKEN, number)

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    def hear(self, seconds: float) -> list[memoryview]:
        """The next message. Raises TimeoutError after so many seconds."""
        return self._transport.receive("weights", timeout=seconds)

    def say(self, offer: Offer, kind: Kind, chunk: int = 0, text: str = "") -> None:
        """Tell the sender something. Raises RunError if it is gone."""
        rest = [text.encode()] if text else []
        head = Head(kind, offer.key, offer.version, chunk=chunk, rank=self._rank, checksum=checksum(rest))
        try:
            self._transport.send(offer.address, [head.pack(), *rest], timeout=self._timeout_s)
        except OSError as error:
            raise RunError(f"the sender of weights {offer.version} cannot be told of chunk {chunk}: {error}") from error

    @property
    def limits(self) -> tuple[int, float, float]:
        """`max_resends`, `timeout_s` and `patience_s`."""
        return self._max_resends, self._timeout_s, self._patience_s


class _Chunks:
    """The chunks of one offer as they come: copies of those that are early wait here."""

    def __init__(self, receiver: WeightReceiver, offer: Offer) -> None:
        self._receiver = receiver
        self._offer = offer
        self._early: dict[int, list[memoryview]] = {}
        self._damaged: dict[int, int] = {}

    def take(self, number: int, chunk: Sequence[Piece]) -> list[memoryview]:
        """The buffers of a chunk, which is the next one in order. Raises RunError as `WeightReceiver.receive` does."""
        _, timeout_s, patience_s = self._receiver.limits
        heard = time.monotonic()
        while number not in self._early:
            try:
                message = self._receiver.hear(patience_s)
            except TimeoutError:
                silent = time.monotonic() - heard
                if silent >= timeout_s:
                    raise RunError(
                        f"chunk {number} of weights {self._offer.version} did not come: nothing came from "
                        f"{self._offer.address} for {silent:.0f} s (weight_sync.timeout_s)"
                    ) from None
                self._receiver.say(self._offer, Kind.AGAIN, number)
                patience_s = min(2 * patience_s, max(timeout_s - silent, 1e-3))
                continue
            if self._keep(message, number):
                heard = time.monotonic()
            del message
        buffers = self._early.pop(number)
        if [len(buffer) for buffer in buffers] != [piece.num_bytes for piece in chunk]:
            raise RunError(f"chunk {number} of weights {self._offer.version} is whole, and not what was announced")
        return buffers

    def _keep(self, message: list[memoryview], number: int) -> bool:
        """Look at a message while chunk `number` is waited for; whether it is one of this offer's, and sound."""
        if not has_head(message):
            return False  # a stranger's, however many it sends
        head = read_head(message)
        if head is None:
            self._ask_again(number, "a head")
            return False
        if head.key != self._offer.key:
            return False  # what was left of an earlier sync
        if checksum(message[1:]) != head.checksum:
            self._ask_again(head.chunk, f"chunk {head.chunk}")
            return False
        if head.kind is Kind.FAILED:
            raise RunError(f"the sender of weights {self._offer.version} gave up: {bytes(message[1]).decode()}")
        if head.kind is Kind.CHUNK and head.chunk >= number:
            is_next = head.chunk == number
            self._early[head.chunk] = message[1:] if is_next else [memoryview(bytes(each)) for each in message[1:]]
        return True

    def _ask_again(self, chunk: int, what: str) -> None:
        max_resends, _, _ = self._receiver.limits
        self._receiver.num_damaged += 1
        self._damaged[chunk] = self._damaged.get(chunk, 0) + 1
        if self._damaged[chunk] > max_resends:
            raise RunError(
                f"{what} of weights {self._offer.version} arrived damaged {self._damaged[chunk]} times; "
                f"weight_sync.max_resends is {max_resends}"
            )
        logger.warning("%s of weights %d arrived damaged and is asked for again", what, self._offer.version)
        self._receiver.say(self._offer, Kind.AGAIN, chunk)


def _read(pieces: Iterator[tuple[Piece, memoryview]], whole: Tensor) -> int:
    """Copy the next piece to its place in a tensor's bytes; returns where it ends. Keeps nothing of it."""
    piece, buffer = next(pieces)
    with warnings.catch_warnings():  # torch says once that this memory is not to be written to, and nobody does
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        whole[piece.start : piece.stop] = torch.frombuffer(buffer, dtype=torch.uint8)
    return piece.stop
