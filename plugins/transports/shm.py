"""Messages through shared memory: between processes of one machine, written once however many read them.

A sender puts a message into a block of shared memory and tells each receiver over a unix socket where it lies;
receivers read it there, and the block is used again when the last of them has let go of it. Small messages travel over
the socket. Nothing has a name in a file system, so that the kernel frees all of it when a process is killed. Only
processes of the same user are listened to. Needs Linux.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstock import Buffer, Transport, UserError, hookimpl, option
from rollstock.plugins.transports._blocks import Block, message_size, write_message
from rollstock.plugins.transports._links import SMALL, Endpoint, Link

_TMPFS = "/dev/shm"


@dataclass(kw_only=True)
class ShmConfig:
    """Options of `transport: {name: shm}`."""

    max_blocks: int = option(
        8, "messages that receivers may hold before a sender waits for them to let go of one", minimum=1, maximum=10_000
    )
    directory: str | None = option(
        _TMPFS, "tmpfs to make blocks in; none: memory that is in no directory, which the size of none limits"
    )

    def __post_init__(self) -> None:
        if self.directory not in (None, _TMPFS) and not os.access(str(self.directory), os.W_OK | os.X_OK):
            raise ValueError(
                f"`directory` {self.directory!r} is none that can be written: make it, or name another, such as "
                f"{_TMPFS}, or none for memory that is in no directory"
            )


class Shm(Transport[ShmConfig]):
    """A pool of blocks to send with, and a socket for each endpoint and each address."""

    def __init__(self, config: ShmConfig | None = None) -> None:
        super().__init__(config)
        if not sys.platform.startswith("linux"):
            raise UserError("transport 'shm' needs Linux: choose another transport, or none")
        self._endpoints: dict[str, Endpoint] = {}
        self._links: dict[str, Link] = {}
        self._blocks: list[Block] = []
        self._numbers = itertools.count()
        self._counts = dict.fromkeys(("bytes_sent", "messages_sent", "bytes_received", "messages_received"), 0)

    def bind(self, name: str) -> str:
        """See `Transport.bind`; the address is of use on this machine alone."""
        self._endpoints[name] = Endpoint()
        return self._endpoints[name].address

    def send(self, address: str, buffers: Sequence[Buffer], *, timeout: float | None = None) -> None:
        """See `Transport.send`. Raises RunError if there is no room for a block."""
        for error in self.broadcast([address], buffers, timeout=timeout).values():
            raise error

    def broadcast(
        self, addresses: Sequence[str], buffers: Sequence[Buffer], *, timeout: float | None = None
    ) -> Mapping[str, OSError]:
        """See `Transport.broadcast`; the message is written once. Raises RunError if there is no room for a block."""
        end = None if timeout is None else time.monotonic() + timeout
        self._hear_releases()
        failed: dict[str, OSError] = {}
        links: list[Link] = []
        for address in dict.fromkeys(addresses):
            try:
                links.append(self._link(address))
            except OSError as error:
                failed[address] = error
        if not links:
            return failed
        length = message_size(buffers)
        try:
            send = self._written(buffers, length, links, end)
        except TimeoutError as error:
            return failed | dict.fromkeys((link.address for link in links), error)
        for link in links:
            try:
                send(link)
            except OSError as error:
                self._drop(link)
                failed[link.address] = error
        self._counts["messages_sent"] += len(addresses) - len(failed)
        self._counts["bytes_sent"] += sum(memoryview(buffer).nbytes for buffer in buffers)
        return failed

    def _written(
        self, buffers: Sequence[Buffer], length: int, links: Sequence[Link], end: float | None
    ) -> Callable[[Link], None]:
        """Put a message where it is to be read; returns what tells a receiver of it."""
        if length <= SMALL:
            small = np.zeros(length, np.uint8)
            write_message(small, buffers)
            message = small.tobytes()
            return lambda link: link.send_message(message, end)
        block = self._free_block(length, end)
        block.write(buffers)
        block.readers.update(link for link in links if link.address in self._links)
        return lambda link: link.send_block(block, length, end)

    def _link(self, address: str) -> Link:
        if address not in self._links:
            self._links[address] = Link(address)
        return self._links[address]

    def _free_block(self, size: int, end: float | None) -> Block:
        """A block that nobody reads. Raises TimeoutError if there is none by `end`."""
        while True:
            free = [block for block in self._blocks if not block.readers]
            fitting = [block for block in free if block.size >= size]
            if fitting:
                return min(fitting, key=lambda block: block.size)
            if free and len(self._blocks) >= self.config.max_blocks:
                self._discard(min(free, key=lambda block: block.size))
            if len(self._blocks) < self.config.max_blocks:
                self._blocks.append(Block(next(self._numbers), size, self.config.directory))
                return self._blocks[-1]
            self._wait_for_release(end)

    def _wait_for_release(self, end: float | None) -> None:
        with selectors.DefaultSelector() as selector:
            for link in self._links.values():
                selector.register(link.socket, selectors.EVENT_READ)
            if not selector.select(None if end is None else max(0.0, end - time.monotonic())):
                raise TimeoutError(f"receivers hold all {len(self._blocks)} blocks of shared memory")
        self._hear_releases()

    def _hear_releases(self) -> None:
        """Note which blocks receivers have let go of; those who are gone have let go of all."""
        blocks = {block.number: block for block in self._blocks}
        for link in list(self._links.values()):
            try:
                for number, use in link.releases():
                    if number in blocks and blocks[number].use == use:
                        blocks[number].readers.discard(link)
            except OSError:
                self._drop(link)

    def _drop(self, link: Link) -> None:
        self._links.pop(link.address, None)
        link.close()
        for block in self._blocks:
            block.readers.discard(link)

    def _discard(self, block: Block) -> None:
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):  # who is gone has forgotten it
                link.forget(block)
        self._blocks.remove(block)
        block.close()

    def receive(self, name: str, *, timeout: float | None = None) -> list[memoryview]:
        """See `Transport.receive`; large buffers are views of the sender's block, and read-only."""
        message = self._endpoints[name].receive(None if timeout is None else time.monotonic() + timeout)
        if message is None:
            raise TimeoutError(f"nothing came to the endpoint {name!r} within {timeout} s")
        self._counts["messages_received"] += 1
        self._counts["bytes_received"] += sum(buffer.nbytes for buffer in message)
        return message

    def close(self) -> None:
        """See `Transport.close`; what receivers hold stays with them."""
        for endpoint in self._endpoints.values():
            endpoint.close()
        for link in self._links.values():
            link.close()
        for block in self._blocks:
            block.close()
        self._endpoints, self._links, self._blocks = {}, {}, []

    def statistics(self) -> dict[str, Any]:
        """See `Transport.statistics`."""
        return dict(self._counts)


@hookimpl
def rollstock_transport() -> type[Transport[Any]]:
    """Give `Shm`."""
    return Shm
