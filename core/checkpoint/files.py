"""Files that are hashed as they pass: written with fsync and optional zstd, read with the digest checked at the end."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import zstandard

from rollstock.checkpoint.errors import CheckpointCorruptError
from rollstock.checkpoint.tensors import CHUNK_BYTES, Reader, Writer

Compression = Literal["zstd", "none"]


@dataclass(frozen=True)
class Digest:
    """What a file must look like: its size in bytes and its SHA-256."""

    size: int
    sha256: str


class _HashingWriter:
    """Counts and hashes what goes into a file; bytes are those on disk, after compression."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: memoryview | bytes) -> int:
        view = memoryview(data)
        total = len(view)
        while view:
            written = self._file.write(view)  # an unbuffered file may take less than it was given
            self._hash.update(view[:written])
            view = view[written:]
        self._size += total
        return total

    def finish(self) -> Digest:
        os.fsync(self._file.fileno())
        return Digest(self._size, self._hash.hexdigest())

    def close(self) -> None:
        self._file.close()


class _HashingReader:
    """Hashes what is read from a file, whoever reads it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._hash = hashlib.sha256()
        self._size = 0

    def readinto(self, buffer: memoryview) -> int:
        count = self._file.readinto(buffer) or 0
        self._hash.update(buffer[:count])
        self._size += count
        return count

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._hash.update(data)
        self._size += len(data)
        return data

    def finish(self) -> Digest:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while self.readinto(buffer):
            pass
        return Digest(self._size, self._hash.hexdigest())

    def close(self) -> None:
        self._file.close()


def write_file(path: Path, fill: Callable[[Writer], None], *, compression: Compression = "none") -> Digest:
    """Create `path` with what `fill` writes, on the disk when this returns; the digest is of the bytes on disk."""
    raw = _HashingWriter(path)
    try:
        if compression == "none":
            fill(raw)
        else:
            # Level 1: trained weights are close to noise, higher levels cost time and find nothing more.
            compressor = zstandard.ZstdCompressor(level=1, threads=min(4, os.cpu_count() or 1), write_checksum=True)
            with compressor.stream_writer(cast(Any, raw), closefd=False) as packed:
                fill(packed)
        return raw.finish()
    finally:
        raw.close()


@contextmanager
def open_file(path: Path, expected: Digest, *, compression: Compression = "none") -> Iterator[Reader]:
    """Read `path`, unpacked, and check the whole file against `expected` when the block ends.

    Raises `CheckpointCorruptError` if the file is missing, damaged or not what `expected` says.
    """
    try:
        raw = _HashingReader(path)
    except OSError as error:
        raise CheckpointCorruptError(f"{path}: cannot be opened ({error.strerror})") from error
    try:
        yield raw if compression == "none" else cast(Reader, zstandard.ZstdDecompressor().stream_reader(cast(Any, raw)))
        found = raw.finish()
    except (OSError, zstandard.ZstdError) as error:
        raise CheckpointCorruptError(f"{path}: cannot be read ({error})") from error
    finally:
        raw.close()
    if found != expected:
        raise CheckpointCorruptError(
            f"{path}: {found.size} bytes with SHA-256 {found.sha256[:12]}..., expected {expected.size} bytes with "
            f"{expected.sha256[:12]}..."
        )


def check_file(path: Path, expected: Digest) -> None:
    """Raise `CheckpointCorruptError` unless the bytes on disk are the expected ones."""
    with open_file(path, expected):
        pass


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; without it a rename may be lost in a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
