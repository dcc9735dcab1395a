"""The transport kind: what moves bytes between processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rollstock.plugin import C, Plugin

Buffer: TypeAlias = bytes | bytearray | memoryview


class Transport(Plugin[C]):
    """Moves messages, each a list of buffers, between named endpoints. Each endpoint is read by one process, and each
    instance used by one thread at a time."""

    @abstractmethod
    def bind(self, name: str) -> str:
        """Open an endpoint to receive on; returns the address that senders need. Only loopback unless an option says
        else."""

    @abstractmethod
    def send(self, address: str, buffers: Sequence[Buffer], *, timeout: float | None = None) -> None:
        """Send one message, in order, without changing it; the buffers are the caller's again when this returns.

        Raises TimeoutError after `timeout` seconds, another OSError where it shows that nobody will receive it.
        """

    def broadcast(
        self, addresses: Sequence[str], buffers: Sequence[Buffer], *, timeout: float | None = None
    ) -> Mapping[str, OSError]:
        """Send one message to several endpoints; returns what `send` would have raised, by address.

        By itself it sends to one after another. Override it where the bytes can go to all at once.
        """
        failed: dict[str, OSError] = {}
        for address in addresses:
            try:
                self.send(address, buffers, timeout=timeout)
            except OSError as error:
                failed[address] = error
        return failed

    @abstractmethod
    def receive(self, name: str, *, timeout: float | None = None) -> list[memoryview]:
        """The next message of a bound endpoint; its buffers keep what they hold for as long as somebody holds them.

        Raises TimeoutError after `timeout` seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all endpoints and free what they hold."""

    def statistics(self) -> dict[str, Any]:
        """Bytes and messages, sent and received: `bytes_sent`, `messages_sent`, `bytes_received`,
        `messages_received`. Bytes that several receivers share count once."""
        return {}
