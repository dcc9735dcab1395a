"""Blocks of shared memory that have no name, so that none is left behind whoever is killed.

For the `shm` transport. A block is a file of a tmpfs that is deleted as soon as it is open (or memory that never had a
file), and reaches other processes as a descriptor; the kernel frees it with the last process that holds it.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence

import numpy as np

from rollstock import Buffer, RunError

ALIGNMENT = 64
"""Each buffer of a message begins at a multiple of so many bytes: of a cache line, and of every number's size."""

GRAIN = 1 << 20
"""Sizes of blocks are multiples of this, so that messages of nearly one size share them."""


class Block:
    """A block of this process, and the receivers that have not let go of what it holds, with the number of its use."""

    def __init__(self, number: int, size: int, directory: str | None) -> None:
        """Raises RunError if there is no room for `size` bytes."""
        self.number = number
        self.size = -(-size // GRAIN) * GRAIN
        self.use = 0
        self.readers: set[object] = set()
        self.descriptor = _make_file(self.size, directory)
        self.memory = mmap.mmap(self.descriptor, self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Put a message at the beginning."""
        self.use += 1
        write_message(np.frombuffer(self.memory, np.uint8), buffers)

    def close(self) -> None:
        """Let go of the memory, which receivers may go on reading."""
        self.memory.close()
        os.close(self.descriptor)


def _make_file(size: int, directory: str | None) -> int:
    if directory is None:
        descriptor = os.memfd_create("rollstock", os.MFD_CLOEXEC)
    else:
        try:
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                descriptor = os.dup(file.fileno())
        except OSError as error:
            raise RunError(f"transport 'shm' cannot make a file in {directory}: {error.strerror}") from error
    try:
        os.posix_fallocate(descriptor, 0, size)  # now, since a page that is missing later kills the process
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
            raise
        raise RunError(_no_room(size, directory)) from error
    return descriptor


def _no_room(size: int, directory: str | None) -> str:
    if directory is None:
        return f"transport 'shm' found no memory for a block of {size >> 20} MiB"
    usage = shutil.disk_usage(directory)
    return (
        f"transport 'shm' found no room for a block of {size >> 20} MiB: {directory} has {usage.free >> 20} MiB free "
        f"of {usage.total >> 20}. Make it larger (of a container by `--shm-size`), choose another with "
        "`transport.directory`, or set that to none, which takes memory that is in no directory"
    )


def message_size(buffers: Sequence[Buffer]) -> int:
    """Bytes that a message takes, with its table of lengths."""
    place = 8 * (1 + len(buffers))
    for buffer in buffers:
        place = _aligned(place) + memoryview(buffer).nbytes
    return place


def write_message(target: np.ndarray[tuple[int], np.dtype[np.uint8]], buffers: Sequence[Buffer]) -> None:
    """Write the number of buffers, their lengths, and each buffer at its alignment. The copies let other threads
    work."""
    lengths = [memoryview(buffer).nbytes for buffer in buffers]
    place = 8 * (1 + len(buffers))
    target[:place] = np.array([len(buffers), *lengths], np.uint64).view(np.uint8)
    for buffer, length in zip(buffers, lengths, strict=True):
        place = _aligned(place)
        np.copyto(target[place : place + length], np.frombuffer(buffer, np.uint8))
        place += length


def read_message(memory: memoryview) -> list[memoryview]:
    """The buffers of a message, as views. Raises ValueError if the table does not fit the memory."""
    if len(memory) < 8:
        raise ValueError("a message without a table of lengths")
    count = int(np.frombuffer(memory[:8], np.uint64)[0])
    place = 8 * (1 + count)
    if place > len(memory):
        raise ValueError(f"a message of {count} buffers in {len(memory)} bytes")
    lengths = [int(length) for length in np.frombuffer(memory[8:place], np.uint64)]
    found = []
    for length in lengths:
        place = _aligned(place)
        if place + length > len(memory):
            raise ValueError("a message whose buffers are longer than itself")
        found.append(memory[place : place + length])
        place += length
    return found


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT
