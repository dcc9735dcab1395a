"""What a sandbox and its workers say to each other: pickles with their length in front, over a socket of their own.

Both ends are rollstock's and only their own data passes, so that pickle is safe here. Values of users travel as bytes
inside the messages: one that cannot be unpickled spoils its own sample and nothing else.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

HEADER = struct.Struct("!Q")
MAX_ANSWER_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Build:
    """First message to a worker: the pickled factory of what it serves."""

    factory: bytes


@dataclass(frozen=True)
class Ask:
    """One call: the pickled request, and the seed of the worker's random generators for it (None leaves them alone)."""

    number: int
    request: bytes
    seed: int | None = None


@dataclass(frozen=True)
class Doing:
    """What the factory is about to make, so that the parent can name it if the process ends without a word."""

    what: str


@dataclass(frozen=True)
class Ready:
    """The factory's product is there; `error` says why it is not, and `users_fault` whether that is a UserError."""

    error: str = ""
    traceback: str = ""
    users_fault: bool = False


@dataclass(frozen=True)
class Answer:
    """What became of a call: a pickled value, or an error. seconds: how long the call itself took."""

    number: int
    value: bytes = b""
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0


def frame(message: object) -> bytes:
    """A message as it is sent."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


class FrameReader:
    """Puts messages together from the pieces in which they arrive."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, piece: bytes) -> Iterator[Any]:
        """Yield the messages that `piece` completes, oldest first."""
        self._pending += piece
        while len(self._pending) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._pending)
            end = HEADER.size + size
            if len(self._pending) < end:
                return
            body = bytes(self._pending[HEADER.size : end])
            del self._pending[:end]
            yield pickle.loads(body)
