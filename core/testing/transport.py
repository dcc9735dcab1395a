"""The conformance kit of transports: bytes arrive whole, in order, at the endpoint that they were sent to.

For authors of transports, who call `check_transport(MyTransport)` in a test.
"""

from __future__ import annotations

import concurrent.futures
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollstock.interfaces.transport import Transport
from rollstock.testing.kit import NotApplicable, Report, expect, fail, run_checks
from rollstock.testing.subject import Subject
from rollstock.testing.subject import check_options as check_plugin_options

WAIT_S = 30.0
ANSWER_S = 20.0  # how long another process may take to start and answer
LARGE = 8 << 20  # bytes: more than sockets and pipes buffer
NOT_IMPORTABLE = 77  # exit code of the other process
ANYWHERE = ("0.0.0.0", "[::]", "//*", "tcp://*")


@dataclass(frozen=True)
class TransportCase:
    """The transport under test."""

    subject: Subject[Transport[Any]]

    @contextmanager
    def pair(self) -> Iterator[tuple[Transport[Any], Transport[Any]]]:
        """Two transports, as two processes would have them, closed afterwards."""
        receiver, sender = self.subject.make(), self.subject.make()
        try:
            yield receiver, sender
        finally:
            sender.close()
            receiver.close()


def check_transport(
    transport: type[Transport[Any]] | Transport[Any] | str,
    *,
    options: Mapping[str, Any] | None = None,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Check a transport, given as a class, an instance or an installed plugin's name.

    options: of the plugin; skip: checks that do not hold on purpose, each with the reason. Raises ConformanceError.
    """
    case = TransportCase(Subject(Transport, transport, options))
    return run_checks(case.subject.label, CHECKS, case, skip=skip)


def check_options(case: TransportCase) -> None:
    """Every option has a help text, and the defaults fit their own types and bounds; making a plugin leaves its
    config alone."""
    check_plugin_options(case.subject)


MESSAGES: tuple[list[bytes | bytearray | memoryview], ...] = (
    [b"one"],
    [],
    [b""],
    [b"", b"two", b""],
    [bytearray(b"three"), memoryview(b"four")],
    [bytes(range(256)) * 17],
    [b"\n", b"\x00\x00\x00\x01", b"quote\"'"],
)


def check_messages(case: TransportCase) -> None:
    """Messages of any number of buffers of any size arrive whole, in the order in which they were sent."""
    with case.pair() as (receiver, sender):
        address = _bind(receiver, "inbox")
        for place, message in enumerate(MESSAGES):
            sender.send(address, message, timeout=WAIT_S)
            found = receiver.receive("inbox", timeout=WAIT_S)
            right = [bytes(buffer) for buffer in message]
            expect(
                [bytes(buffer) for buffer in found] == right,
                f"message {place} of {len(right)} buffers {right!r:.100} arrives as {[bytes(b) for b in found]!r:.100}",
                mend="send the number of buffers and the length of each before their bytes",
            )
            expect(
                all(isinstance(buffer, memoryview) for buffer in found),
                f"buffers arrive as {[type(buffer).__name__ for buffer in found]}",
                mend="return memoryviews: `memoryview(data)`",
            )


def _bind(transport: Transport[Any], name: str) -> str:
    address: object = transport.bind(name)
    expect(isinstance(address, str) and address, f"`bind` gives {address!r}", mend="return the address as a text")
    assert isinstance(address, str)
    return address


def check_order(case: TransportCase) -> None:
    """Messages of one sender arrive in their order, each once, although the receiver is late."""
    with case.pair() as (receiver, sender), concurrent.futures.ThreadPoolExecutor(1) as threads:
        address = _bind(receiver, "inbox")
        sending = threads.submit(lambda: [sender.send(address, [str(i).encode()], timeout=WAIT_S) for i in range(50)])
        found = [bytes(receiver.receive("inbox", timeout=WAIT_S)[0]).decode() for _ in range(50)]
        sending.result(WAIT_S)
        expect(
            found == [str(i) for i in range(50)],
            f"50 messages arrive as {found}",
            mend="keep a queue, first in, first out",
        )


def check_large(case: TransportCase) -> None:
    """A message larger than what a system buffers arrives whole."""
    payload = bytes(range(256)) * (LARGE // 256)
    with case.pair() as (receiver, sender), concurrent.futures.ThreadPoolExecutor(1) as threads:
        address = _bind(receiver, "inbox")
        sending = threads.submit(lambda: sender.send(address, [payload, b"end"], timeout=WAIT_S))
        found = receiver.receive("inbox", timeout=WAIT_S)
        sending.result(WAIT_S)
        expect(
            len(found) == 2 and bytes(found[0]) == payload and bytes(found[1]) == b"end",
            f"{LARGE >> 20} MiB and 3 bytes arrive as {[len(buffer) for buffer in found]} bytes",
            mend="read until the announced length is there: one call may give a part",
        )


def check_broadcast(case: TransportCase) -> None:
    """One message to several endpoints arrives at each of them, small or large; nobody else's is late for one that is
    gone."""
    with case.pair() as (receiver, sender), case.pair() as (other, _):
        addresses = [_bind(receiver, "left"), _bind(receiver, "right"), _bind(other, "inbox")]
        payload = bytes(range(256)) * (LARGE // 1024)
        for message in ([b"to", b"all"], [payload, b"end"]):
            with concurrent.futures.ThreadPoolExecutor(1) as threads:
                sending = threads.submit(sender.broadcast, addresses, message, timeout=WAIT_S)
                for transport, name in ((receiver, "left"), (receiver, "right"), (other, "inbox")):
                    found = [bytes(buffer) for buffer in transport.receive(name, timeout=WAIT_S)]
                    expect(found == message, f"a broadcast arrives at {name!r} as {found!r:.100}", mend=BROADCAST)
                failed = sending.result(WAIT_S)
            expect(not failed, f"a broadcast to {len(addresses)} endpoints says {failed!r:.200}", mend=BROADCAST)
        gone = case.subject.make()
        nowhere = _bind(gone, "inbox")
        gone.close()
        failed = sender.broadcast([nowhere, addresses[0]], [b"again"], timeout=1.0)
        found = [bytes(buffer) for buffer in receiver.receive("left", timeout=WAIT_S)]
        expect(found == [b"again"], f"beside one that is gone, a broadcast arrives as {found!r}", mend=BROADCAST)
        expect(
            set(failed) == {nowhere} and all(isinstance(error, OSError) for error in failed.values()),
            f"a broadcast to an endpoint that is gone says {failed!r:.200}",
            mend="return the OSError that `send` raises, TimeoutError among them, by the address that it is for",
        )


BROADCAST = "leave `broadcast` to the base class, or send as `send` does to each address"


def check_ownership(case: TransportCase) -> None:
    """Once sent, buffers are the sender's to change; once received, they are the receiver's to keep."""
    with case.pair() as (receiver, sender), concurrent.futures.ThreadPoolExecutor(1) as threads:
        address = _bind(receiver, "inbox")
        payload, kept = bytearray(LARGE // 8), []
        for value in range(4):
            payload[:] = bytes([value]) * len(payload)
            sending = threads.submit(sender.send, address, [payload], timeout=WAIT_S)
            if value % 2:  # early or late
                sending.result(WAIT_S)
            kept.append(receiver.receive("inbox", timeout=WAIT_S)[0])
            sending.result(WAIT_S)
        for value, buffer in enumerate(kept):
            expect(
                bytes(buffer) == bytes([value]) * len(payload),
                f"message {value} changed while its receiver kept it, or its sender took it back",
                mend="read the buffers before `send` returns, and use no memory again that a receiver still holds",
            )


def check_endpoints(case: TransportCase) -> None:
    """Endpoints have their own messages, whoever sends them."""
    with case.pair() as (receiver, sender):
        addresses = {name: _bind(receiver, name) for name in ("left", "right")}
        expect(addresses["left"] != addresses["right"], "two endpoints have one address", mend="one address for each")
        sender.send(addresses["right"], [b"to the right"], timeout=WAIT_S)
        receiver.send(addresses["left"], [b"to the left"], timeout=WAIT_S)
        for name in addresses:
            found = bytes(receiver.receive(name, timeout=WAIT_S)[0])
            expect(
                found == f"to the {name}".encode(),
                f"endpoint {name!r} gets {found!r}",
                mend="a queue for each endpoint",
            )


def check_timeout(case: TransportCase) -> None:
    """`receive` raises TimeoutError when nothing came in time, and still gets what comes later."""
    with case.pair() as (receiver, sender):
        address = _bind(receiver, "inbox")
        began = time.monotonic()
        try:
            receiver.receive("inbox", timeout=0.2)
        except TimeoutError:
            waited = time.monotonic() - began
            expect(0.1 <= waited < 10, f"a timeout of 0.2 s took {waited:.1f} s", mend="`timeout` is in seconds")
        else:
            fail("`receive` returned although nothing was sent", mend="raise TimeoutError after `timeout` seconds")
        sender.send(address, [b"late"], timeout=WAIT_S)
        found = receiver.receive("inbox", timeout=WAIT_S)
        expect(bytes(found[0]) == b"late", f"after a timeout {found!r} arrives", mend="lose nothing when time is up")


def check_privacy(case: TransportCase) -> None:
    """Without an option that says otherwise, nothing listens on other addresses than loopback."""
    with case.pair() as (receiver, _):
        address = _bind(receiver, "inbox")
        expect(
            not any(mark in address for mark in ANYWHERE),
            f"the endpoint listens at {address}, for everyone",
            mend="bind to 127.0.0.1, a unix socket or shared memory",
        )


def check_processes(case: TransportCase) -> None:
    """A message reaches another process, and its answer comes back."""
    mend = "an address must be of use in every process of this machine"
    sent = [b"ping", b"x" * 100_000]
    with case.pair() as (receiver, sender), _echo(case, _bind(receiver, "here")) as process:
        message = _await(receiver, process)
        if process.poll() == NOT_IMPORTABLE:
            module = case.subject.cls.__module__
            raise NotApplicable(f"another process cannot import {module}: install the plugin to have this checked")
        expect(message, "another process on this machine cannot reach this one", mend=mend)
        sender.send(bytes(message[0]).decode(), sent, timeout=WAIT_S)
        answer = [bytes(buffer) for buffer in _await(receiver, process)]
        expect(answer == [*sent, b"pong"], f"another process answers {answer!r:.100}", mend=mend)


def _await(receiver: Transport[Any], process: subprocess.Popen[bytes]) -> list[memoryview]:
    """The next message, or none if the other process has ended or takes too long."""
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end:
        over = process.poll() is not None
        try:
            return receiver.receive("here", timeout=0.2)
        except TimeoutError:
            if over:
                break
    return []


@contextmanager
def _echo(case: TransportCase, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that runs `echo`, ended afterwards."""
    try:
        plugin = pickle.dumps((case.subject.cls, case.subject.config))
    except Exception as error:
        raise NotApplicable(f"the class cannot be sent to another process: {error}") from None
    code = f"import sys; sys.path[:] = {sys.path!r}; from rollstock.testing.transport import echo; echo(sys.argv[1])"
    process = subprocess.Popen([sys.executable, "-c", code, address], stdin=subprocess.PIPE)
    try:
        assert process.stdin is not None
        process.stdin.write(plugin)
        process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()


def echo(address: str) -> None:
    """The other process: say where it listens, and send the first message back with `pong` behind it."""
    try:
        cls, config = pickle.load(sys.stdin.buffer)
    except (ImportError, AttributeError):
        sys.exit(NOT_IMPORTABLE)
    transport: Transport[Any] = cls(config)
    transport.send(address, [transport.bind("there").encode()], timeout=WAIT_S)
    message = transport.receive("there", timeout=WAIT_S)
    transport.send(address, [*message, b"pong"], timeout=WAIT_S)
    time.sleep(WAIT_S)  # what was sent last may still be on its way; the check ends this process


def check_closing(case: TransportCase) -> None:
    """`close` frees the endpoints, may be called twice, and ends with nothing bound."""
    case.subject.make().close()
    for _ in range(2):
        with case.pair() as (receiver, sender):
            address = _bind(receiver, "inbox")
            sender.send(address, [b"again"], timeout=WAIT_S)
            found = bytes(receiver.receive("inbox", timeout=WAIT_S)[0])
            expect(
                found == b"again", f"after `close`, a new endpoint of the name gets {found!r}", mend="free what it held"
            )
            sender.close()
            receiver.close()


def check_statistics(case: TransportCase) -> None:
    """Statistics are numbers by name; where bytes are counted, they grow with what was sent."""
    with case.pair() as (receiver, sender):
        address = _bind(receiver, "inbox")
        before: Callable[[], Mapping[str, Any]] = sender.statistics
        first = dict(before())
        sender.send(address, [b"x" * 1000], timeout=WAIT_S)
        receiver.receive("inbox", timeout=WAIT_S)
        after = dict(sender.statistics())
        numbers: Sequence[Any] = [*first.values(), *after.values()]
        expect(
            all(isinstance(value, int | float) for value in numbers),
            f"statistics are {after}",
            mend="give numbers, such as {'bytes_sent': 1000, 'messages_sent': 1}",
        )
        if "bytes_sent" in after:
            grown = after["bytes_sent"] - first.get("bytes_sent", 0)
            expect(grown >= 1000, f"1000 bytes were sent, and bytes_sent grew by {grown}", mend="count every buffer")


CHECKS = (
    check_options,
    check_messages,
    check_order,
    check_large,
    check_broadcast,
    check_ownership,
    check_endpoints,
    check_timeout,
    check_privacy,
    check_processes,
    check_closing,
    check_statistics,
)
