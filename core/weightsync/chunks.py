"""How tensors are cut into chunks, and what the bytes of one are."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollstock.interfaces.transport import Buffer


@dataclass(frozen=True)
class Piece:
    """The bytes `start` to `stop` of a tensor, by its place in the table."""

    tensor: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return self.stop - self.start


def cut(sizes: Sequence[int], chunk_bytes: int) -> list[list[Piece]]:
    """Chunks of at most `chunk_bytes`, which hold all tensors of these sizes, in order; both ends cut alike.

    Only a tensor that is larger than a chunk is cut, so that the others can be read where they arrive.
    """
    chunks: list[list[Piece]] = []
    room = 0
    for tensor, size in enumerate(sizes):
        for start in range(0, size, chunk_bytes):
            stop = min(size, start + chunk_bytes)
            if stop - start > room:
                chunks.append([])
                room = chunk_bytes
            chunks[-1].append(Piece(tensor, start, stop))
            room -= stop - start
    return chunks


def memory_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in one row, a view where they lie in one."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def bytes_of(memory: Sequence[Tensor], chunk: Iterable[Piece]) -> list[memoryview]:
    """The pieces of a chunk, of tensors given as `memory_of` gives them; views of those that are in main memory."""
    return [memory[piece.tensor][piece.start : piece.stop].cpu().numpy().data for piece in chunk]


def checksum(buffers: Iterable[Buffer]) -> int:
    """The CRC32 of buffers as if they were one."""
    found = 0
    for buffer in buffers:
        found = zlib.crc32(buffer, found)
    return found
