"""Standard output and error that may end before the command does: a full disk, a reader that has seen enough.

For `rollstock.cli.main`. What can no longer be written is dropped, so that neither a run nor a message to the other
stream fails with it; what was lost is told at the end.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Descriptor(io.RawIOBase):
    """A file descriptor that somebody else closes; writing to it never fails, and the first `failure` is kept."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        while self.failure is None:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # whoever has the other end made it non-blocking, and is slow
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.failure = error
        return len(memoryview(data).cast("B"))


class Streams:
    """The streams of a command, guarded; those that are no files, such as a test's, are left as they are."""

    def __init__(self) -> None:
        self._before = sys.stdout, sys.stderr
        self._raw: dict[str, _Descriptor] = {}
        sys.stdout = self._guarded("stdout", self._before[0])
        sys.stderr = self._guarded("stderr", self._before[1])

    @property
    def lost(self) -> str:
        """Why some of standard output was not written; empty if all was, or its reader had seen enough."""
        sys.stdout.flush()
        failure = self._raw["stdout"].failure if "stdout" in self._raw else None
        return "" if failure is None or failure.errno == errno.EPIPE else str(failure.strerror)

    def restore(self) -> None:
        """Put back what was there before."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = self._before

    def _guarded(self, name: str, stream: TextIO | None) -> TextIO:
        if stream is None:  # the process was started with it closed (`>&-`)
            return open(os.devnull, "w")  # it stays open as long as the process
        try:
            stream.flush()
            raw = _Descriptor(stream.fileno())
        except (OSError, ValueError):
            return stream
        self._raw[name] = raw
        return io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=name == "stderr" or raw.isatty(),
        )


@contextmanager
def guarded_streams() -> Iterator[Streams]:
    """Guard `sys.stdout` and `sys.stderr` for the length of a command."""
    streams = Streams()
    try:
        yield streams
    finally:
        streams.restore()
