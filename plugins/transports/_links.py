"""The sockets beside blocks of shared memory: who is told that a message lies where, and who has let go of it.

For the `shm` transport. A `Link` is a sender's connection to one endpoint, an `Endpoint` what a receiver reads. They
are unix sockets in the kernel's abstract namespace, which have no file and end with their process. There are four kinds
of packet:

- MESSAGE: a small message itself;
- BLOCK: a message in a block, by the block's number and the number of its use; the first one brings the descriptor;
- FORGET: a block is no longer in use;
- RELEASE, the only one that goes back: a receiver has let go of what a block held in that use.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import mmap
import os
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Iterator

import numpy as np

from rollstock.plugins.transports._blocks import Block, read_message

logger = logging.getLogger(__name__)

SCHEME = "shm:"
SMALL = 32 << 10
"""Bytes up to which a message travels in its packet."""

MESSAGE, BLOCK, FORGET, RELEASE = range(1, 5)
_PACKET = struct.Struct("<BIQQ")
"""The kind of packet, a block's number, the number of its use, and the length of the message in it."""

_LONGEST = _PACKET.size + 2 * SMALL
_CREDENTIALS = struct.Struct("iII")


def _is_trusted(connection: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


class Link:
    """A sender's connection to one endpoint."""

    def __init__(self, address: str) -> None:
        """Raises ConnectionError if nobody is there, or another user."""
        if not address.startswith(SCHEME):
            raise ConnectionRefusedError(f"{address!r} is no address of shared memory")
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.socket.connect(f"\0{address.removeprefix(SCHEME)}")
            if not _is_trusted(self.socket):
                raise ConnectionRefusedError(f"{address} belongs to another user")
        except OSError as error:
            self.socket.close()
            raise ConnectionRefusedError(f"nobody is at {address}: {error}") from error
        self._known: set[int] = set()

    def send_message(self, message: bytes, end: float | None) -> None:
        """Send a small message. Raises TimeoutError after `end`, ConnectionError if the receiver is gone."""
        self._send(_PACKET.pack(MESSAGE, 0, 0, len(message)) + message, end)

    def send_block(self, block: Block, length: int, end: float | None) -> None:
        """Say that a message lies in a block. Raises as `send_message` does."""
        descriptors = () if block.number in self._known else (block.descriptor,)
        self._send(_PACKET.pack(BLOCK, block.number, block.use, length), end, descriptors)
        self._known.add(block.number)

    def forget(self, block: Block) -> None:
        """Say that a block is no longer in use. Raises as `send_message` does."""
        if block.number in self._known:
            self._known.discard(block.number)
            self._send(_PACKET.pack(FORGET, block.number, 0, 0), time.monotonic() + 1.0)

    def _send(self, packet: bytes, end: float | None, descriptors: tuple[int, ...] = ()) -> None:
        self.socket.settimeout(None if end is None else max(1e-3, end - time.monotonic()))
        socket.send_fds(self.socket, [packet], descriptors)

    def releases(self) -> Iterator[tuple[int, int]]:
        """Blocks that the receiver has let go of, each with the number of the use, without waiting. Raises
        ConnectionError if the receiver is gone."""
        self.socket.setblocking(False)
        while True:
            try:
                packet = self.socket.recv(_LONGEST)
            except BlockingIOError:
                return
            if not packet:
                raise ConnectionResetError(f"the receiver at {self.address} is gone")
            _, number, use, _ = _PACKET.unpack(packet)
            yield number, use

    def close(self) -> None:
        """End the connection."""
        self.socket.close()


class _Sender:
    """A sender, as its receiver sees it: the connection and the blocks that came over it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._blocks: dict[int, mmap.mmap] = {}
        self._released: collections.deque[bytes] = collections.deque()

    def read(self) -> list[memoryview] | None:
        """The message of the next packet; None if it brings none. Raises EOFError if the sender is gone."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self.connection, _LONGEST, 1)
        except ConnectionError as error:
            raise EOFError from error
        if len(packet) < _PACKET.size:
            raise EOFError
        kind, number, use, length = _PACKET.unpack_from(packet)
        if descriptors:
            self._map(number, descriptors[0])
        if kind == FORGET:
            self._blocks.pop(number, None)
        if kind == MESSAGE:
            return read_message(memoryview(packet)[_PACKET.size :])
        return self._lent(number, use, length) if kind == BLOCK else None

    def _map(self, number: int, descriptor: int) -> None:
        try:
            size = os.fstat(descriptor).st_size
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._blocks[number] = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def _lent(self, number: int, use: int, length: int) -> list[memoryview]:
        """A message in a block. The block goes back to the sender with the last view of it."""
        whole = np.frombuffer(self._blocks[number], np.uint8, length)
        weakref.finalize(whole, self._release, number, use).atexit = False
        return read_message(whole.data)

    def _release(self, number: int, use: int) -> None:
        """Runs wherever the last view is let go of, so it must not wait."""
        self._released.append(_PACKET.pack(RELEASE, number, use, 0))
        self.flush()

    def flush(self) -> None:
        """Tell the sender of what was let go of."""
        with contextlib.suppress(OSError):  # later, or to nobody
            while self._released:
                self.connection.send(self._released[0], socket.MSG_DONTWAIT)
                self._released.popleft()


class Endpoint:
    """Where a receiver hears of messages."""

    def __init__(self) -> None:
        name = f"rollstock-{os.getpid()}-{secrets.token_hex(8)}"
        self.address = f"{SCHEME}{name}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name}")
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._senders: list[_Sender] = []

    def receive(self, end: float | None) -> list[memoryview] | None:
        """The next message; None if none has come by `end`."""
        for sender in self._senders:
            sender.flush()
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = self._selector.select(left)
            if not ready:
                return None
            for key, _ in ready:
                if key.data is None:
                    self._accept()
            waiting = {id(key.data) for key, _ in ready}
            for sender in [sender for sender in self._senders if id(sender) in waiting]:
                message = self._read(sender)
                if message is not None:
                    return message

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            if not _is_trusted(connection):
                logger.warning("a process of another user tried to send to %s", self.address)
                connection.close()
                return
            self._senders.append(_Sender(connection))
            self._selector.register(connection, selectors.EVENT_READ, self._senders[-1])

    def _read(self, sender: _Sender) -> list[memoryview] | None:
        self._senders.remove(sender)
        try:
            message = sender.read()
        except (EOFError, ValueError, KeyError, struct.error) as error:
            if not isinstance(error, EOFError):
                logger.warning("%s ends a connection that does not keep to the protocol: %s", self.address, error)
            self._selector.unregister(sender.connection)
            sender.connection.close()
            return None
        self._senders.append(sender)  # behind the others, so that nobody waits for ever
        return message

    def close(self) -> None:
        """End the connections; what was received stays."""
        self._selector.close()
        self._listener.close()
        for sender in self._senders:
            sender.connection.close()
        self._senders = []
