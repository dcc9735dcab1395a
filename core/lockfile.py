"""A lock that dies with its process: one writer at a time for a run directory and for a checkpoint folder.

The kernel holds the lock (POSIX record locks), so a process that was killed never leaves one behind, whatever its
process id is used for next, and a worker forked from the holder does not keep it alive. The text in the file (process
id, host, start) is there for the message only.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from rollstock.errors import UserError

_log = logging.getLogger(__name__)
_held: set[tuple[int, str]] = set()
"""(process, path) of the locks held here: record locks do not exclude two holders within one process."""


class LockedError(UserError):
    """Another process (or another object in this one) holds the lock; the message says who and since when."""


class LockFile:
    """An exclusive lock at `path`, which need not exist yet; its folder must.

    `what` names the locked thing in messages ("the run directory runs/a"). Usable as a context manager.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self.what = what
        self._descriptor: int | None = None
        self._owner = 0

    @property
    def held(self) -> bool:
        """Whether this object holds the lock; a copy that a fork made of it does not."""
        return self._descriptor is not None and self._owner == os.getpid()

    def is_held_by_anyone(self) -> bool:
        """Whether some process, this one included, holds the lock now; for showing, not for deciding what to write."""
        if (os.getpid(), str(self.path.resolve())) in _held:
            return True  # and do not open the file: closing it again would drop the lock of this process
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def acquire(self) -> None:
        """Take the lock, at once or not at all: raises `LockedError` if somebody has it."""
        if self.held:
            return
        key = (os.getpid(), str(self.path.resolve()))
        if key in _held:
            raise LockedError(f"{self.what} is in use by this very process")
        descriptor = self._open_locked()
        left_over = os.pread(descriptor, 4096, 0)
        if left_over:
            _log.warning("%s was left locked by %s, which has ended; going on", self.what, _describe(left_over))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _own_text(), 0)
        self._descriptor, self._owner = descriptor, os.getpid()
        _held.add(key)

    def _open_locked(self) -> int:
        """A descriptor of the file, locked; raises `LockedError`."""
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _describe(os.pread(descriptor, 4096, 0))
                os.close(descriptor)
                raise LockedError(
                    f"{self.what} is in use by {holder}. Wait for it to end, stop it, or choose another directory."
                ) from error
            if _is_at(descriptor, self.path):
                return descriptor
            os.close(descriptor)  # its holder has removed it between the opening and the locking

    def release(self, *, remove: bool = False) -> None:
        """Give the lock back, and `remove` its file if that is told; no harm if it is not held."""
        if self._descriptor is None or not self.held:
            return
        _held.discard((os.getpid(), str(self.path.resolve())))
        os.ftruncate(self._descriptor, 0)
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> LockFile:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that lies at `path` now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _own_text() -> bytes:
    facts = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    return json.dumps(facts).encode()


def _describe(text: bytes) -> str:
    try:
        facts = json.loads(text)
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
