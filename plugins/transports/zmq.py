"""Messages over TCP with ZeroMQ: between processes of one machine, or of several.

Each endpoint is a PULL socket, each address that is sent to a PUSH socket. A message is a multipart message: a mark,
then one frame a buffer. Large frames are sent from the caller's memory and received into memory that is handed out as
it is. Nothing is ever pickled. Endpoints listen on the loopback device unless `host` says else; then whoever reaches
that address can send to them, so the network must be one to trust. Needs pyzmq: `pip install 'rollstock[zmq]'`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from rollstock import Buffer, RunError, Transport, hookimpl, option

logger = logging.getLogger(__name__)

MARK = b"rollstock/1"
"""The first frame of every message; what comes without it is not ours."""

COPIED = 65_536
"""Bytes up to which a frame is copied: for those, keeping track costs more."""

LINGER_MS = 2_000
"""How long `close` waits for what is still on its way to the kernel."""


@dataclass(kw_only=True)
class ZmqConfig:
    """Options of `transport: {name: zmq}`."""

    host: str = option(
        "127.0.0.1",
        "address of this machine that endpoints listen on; auto: the one by which it reaches others, for workers on "
        "several machines",
    )
    queue: int = option(
        8, "messages that may wait at either end of a connection before a sender has to", minimum=1, maximum=1_000_000
    )

    def __post_init__(self) -> None:
        if self.host == "auto":
            return
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            raise ValueError(f"`host` must be an IP address, or auto, not {self.host!r}") from None
        if address.is_unspecified:
            raise ValueError(f"`host` {self.host!r} stands for every network of the machine; name one address, or auto")


class Zmq(Transport[ZmqConfig]):
    """Keeps one socket for each endpoint, and one for each address."""

    def __init__(self, config: ZmqConfig | None = None) -> None:
        super().__init__(config)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._inboxes: dict[str, zmq.Socket[bytes]] = {}
        self._outlets: dict[str, zmq.Socket[bytes]] = {}
        self._counts = dict.fromkeys(("bytes_sent", "messages_sent", "bytes_received", "messages_received"), 0)

    def bind(self, name: str) -> str:
        """See `Transport.bind`; the system chooses the port. Raises RunError if this machine has no such address."""
        host = own_address() if self.config.host == "auto" else self.config.host
        inbox = self._open(zmq.PULL)
        inbox.rcvhwm = self.config.queue
        inbox.ipv6 = ":" in host
        try:
            inbox.bind(f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0")
        except zmq.ZMQError as error:
            inbox.close()
            raise RunError(f"transport 'zmq' cannot listen on {host}: {error}") from error
        self._inboxes[name] = inbox
        return inbox.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        if self._context is None:
            self._context = zmq.Context()
        return self._context.socket(kind)

    def _outlet(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._outlets:
            outlet = self._open(zmq.PUSH)
            outlet.sndhwm = self.config.queue
            outlet.immediate = True  # a message waits for a receiver with us, where it shows, and not in the socket
            outlet.linger = LINGER_MS
            outlet.ipv6 = "[" in address
            outlet.connect(address)
            self._outlets[address] = outlet
        return self._outlets[address]

    def send(self, address: str, buffers: Sequence[Buffer], *, timeout: float | None = None) -> None:
        """See `Transport.send`; returns when the kernel has taken the large frames."""
        for error in self.broadcast([address], buffers, timeout=timeout).values():
            raise error

    def broadcast(
        self, addresses: Sequence[str], buffers: Sequence[Buffer], *, timeout: float | None = None
    ) -> Mapping[str, OSError]:
        """See `Transport.broadcast`; the receivers get the bytes side by side."""
        end = None if timeout is None else time.monotonic() + timeout
        failed: dict[str, OSError] = {}
        trackers: dict[str, zmq.MessageTracker] = {}
        waiting = {self._outlet(address): address for address in addresses}
        poller = zmq.Poller()
        for outlet in waiting:
            poller.register(outlet, zmq.POLLOUT)
        while waiting:
            ready = poller.poll(_left_ms(end))
            if not ready:
                break
            for outlet, _ in ready:
                poller.unregister(outlet)
                trackers[waiting.pop(outlet)] = _queue(outlet, buffers)
        for address in waiting.values():
            failed[address] = TimeoutError(f"{address} took no message within {timeout} s")
        for address, tracker in trackers.items():
            try:
                tracker.wait(-1 if end is None else max(0.0, end - time.monotonic()))
            except zmq.NotDone:
                failed[address] = TimeoutError(f"{address} has not taken all of a message within {timeout} s")
        num_sent = len(addresses) - len(failed)
        self._counts["messages_sent"] += num_sent
        self._counts["bytes_sent"] += num_sent * sum(memoryview(buffer).nbytes for buffer in buffers)
        return failed

    def receive(self, name: str, *, timeout: float | None = None) -> list[memoryview]:
        """See `Transport.receive`. What does not begin with our mark is logged and thrown away."""
        end = None if timeout is None else time.monotonic() + timeout
        for frames in self._arriving(name, end):
            mark, *buffers = (memoryview(frame.buffer) for frame in frames)
            if mark != MARK:
                logger.warning("endpoint %r threw away a message that is not of rollstock", name)
                continue
            self._counts["messages_received"] += 1
            self._counts["bytes_received"] += sum(buffer.nbytes for buffer in buffers)
            return buffers
        raise TimeoutError(f"nothing came to the endpoint {name!r} within {timeout} s")

    def _arriving(self, name: str, end: float | None) -> Iterator[list[zmq.Frame]]:
        inbox = self._inboxes[name]
        while inbox.poll(_left_ms(end), zmq.POLLIN):
            yield inbox.recv_multipart(copy=False)

    def close(self) -> None:
        """See `Transport.close`; waits up to two seconds for what was sent last."""
        for inbox in self._inboxes.values():
            inbox.close(linger=0)
        for outlet in self._outlets.values():
            outlet.close()
        self._inboxes, self._outlets = {}, {}
        if self._context is not None:
            self._context.term()
            self._context = None

    def statistics(self) -> dict[str, Any]:
        """See `Transport.statistics`; each receiver's bytes count."""
        return dict(self._counts)


def own_address() -> str:
    """The address of this machine that it has towards others, or the loopback device's if it has none. Sends
    nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # kept for documentation, by RFC 5737: only the way there is looked up
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _queue(outlet: zmq.Socket[bytes], buffers: Sequence[Buffer]) -> zmq.MessageTracker:
    """Hand a message to a socket that has room for it; the tracker says when it reads the buffers no more. The frames
    must be gone by then, so they stay in here."""
    frames = [_frame(buffer) for buffer in buffers]
    outlet.send_multipart([MARK, *frames], zmq.NOBLOCK, copy=False)
    return zmq.MessageTracker(*(frame for frame in frames if isinstance(frame, zmq.Frame)))


def _frame(buffer: Buffer) -> zmq.Frame | bytes:
    view = memoryview(buffer)
    return bytes(view) if view.nbytes < COPIED else zmq.Frame(view, track=True, copy=False, copy_threshold=0)


def _left_ms(end: float | None) -> int | None:
    """What is left until `end`, as sockets want it; None for ever."""
    return None if end is None else max(0, int(1000 * (end - time.monotonic()) + 0.5))


@hookimpl
def rollstock_transport() -> type[Transport[Any]]:
    """Give `Zmq`."""
    return Zmq
