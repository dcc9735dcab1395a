"""The transport kind: what moves bytes between processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

from rollstock.plugin import C, Plugin

Buffer: TypeAlias = bytes | bytearray | memoryview


class Transport(Plugin[C]):
    """Moves messages, each a list of buffers, between named endpoints. Each endpoint is read by one process."""

    @abstractmethod
    def bind(self, name: str) -> str:
        """Open an endpoint to receive on; returns the address that senders need. Only loopback unless an option says
        else."""

    @abstractmethod
    def send(self, address: str, buffers: Sequence[Buffer], *, timeout: float | None = None) -> None:
        """Send one message, in order, without changing it. Raises TimeoutError after `timeout` seconds."""

    @abstractmethod
    def receive(self, name: str, *, timeout: float | None = None) -> list[memoryview]:
        """The next message of a bound endpoint. Raises TimeoutError after `timeout` seconds."""

    @abstractmethod
    def close(self) -> None:
        """Close all endpoints and free what they hold."""

    def statistics(self) -> dict[str, Any]:
        """Bytes and messages, sent and received."""
        return {}
