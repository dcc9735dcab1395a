"""The messages of a weight sync: a sealed head, and what it is about.

A head is a fixed structure that ends with its own CRC32, so that a damaged one is known and thrown away. Its key is
that of one sync: messages of another, or of a stranger, are not looked at.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from rollstock.interfaces.transport import Buffer

_HEAD = struct.Struct("!4sB16sQIII")
_SEAL = struct.Struct("!I")
_MARK = b"RSW1"


class Kind(enum.IntEnum):
    """What a message says.

    CHUNK and FAILED (with the reason) come from the sender; TAKEN (this chunk and all before it), AGAIN (send this
    chunk) and JOIN (send everything, to the address that follows) from a receiver.
    """

    CHUNK = 1
    TAKEN = 2
    AGAIN = 3
    JOIN = 4
    FAILED = 5


@dataclass(frozen=True)
class Head:
    """The head of a message. rank: the receiver's; checksum: of the buffers that follow."""

    kind: Kind
    key: bytes
    version: int
    chunk: int = 0
    rank: int = 0
    checksum: int = 0

    def pack(self) -> bytes:
        """As it travels."""
        head = _HEAD.pack(_MARK, self.kind, self.key, self.version, self.chunk, self.rank, self.checksum)
        return head + _SEAL.pack(zlib.crc32(head))


def has_head(buffers: Sequence[Buffer]) -> bool:
    """Whether a message begins with something of a head's size: damaged or not, it may be one of ours."""
    return bool(buffers) and len(buffers[0]) == _HEAD.size + _SEAL.size


def read_head(buffers: Sequence[Buffer]) -> Head | None:
    """The head of a message; None if it is damaged, or no head at all."""
    if not has_head(buffers):
        return None
    packed = bytes(buffers[0])
    head, (seal,) = packed[: _HEAD.size], _SEAL.unpack(packed[_HEAD.size :])
    if zlib.crc32(head) != seal:
        return None
    mark, kind, *rest = _HEAD.unpack(head)
    if mark != _MARK or kind not in Kind.__members__.values():
        return None
    return Head(Kind(kind), *rest)
