"""The parent's handle of one worker process: its descriptors, its limit, its output.

For `rollstock.sandbox.pool`, which decides what to send and what an end means.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

from rollstock.sandbox.protocol import FrameReader, frame
from rollstock.sandbox.tree import end_tree

# The parent's import path, so that the worker finds what the parent finds; set before rollstock itself is imported.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from rollstock.sandbox.worker import main; main()"
)
OUTPUT_BYTES = 16 * 2**10
READ_BYTES = 1 << 18


@dataclass
class Output:
    """What a worker printed during one call: its beginning, and how much more there was."""

    kept: bytearray = field(default_factory=bytearray)
    num_dropped: int = 0

    def add(self, piece: bytes) -> None:
        """Keep as much of `piece` as fits."""
        room = OUTPUT_BYTES - len(self.kept)
        self.kept += piece[:room]
        self.num_dropped += max(0, len(piece) - room)

    def take(self) -> str:
        """The text so far; the next one starts empty."""
        text = self.kept.decode(errors="replace")
        if self.num_dropped:
            text += f"\n... ({self.num_dropped} more bytes)"
        self.kept, self.num_dropped = bytearray(), 0
        return text


class WorkerProcess:
    """A running worker. `deadline` is when it must have answered (monotonic seconds), None while it has nothing to
    do; `making` is what its factory makes, as far as that has said so."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline_theirs, self._lifeline = os.pipe()
        self.output_fd, output_theirs = os.pipe()
        arguments = [str(theirs.fileno()), str(lifeline_theirs), json.dumps(sys.path)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output_theirs,
                stderr=output_theirs,
                pass_fds=(theirs.fileno(), lifeline_theirs),
                env=worker_environment(),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            os.close(self._lifeline)
            os.close(self.output_fd)
            raise
        finally:
            theirs.close()
            os.close(lifeline_theirs)
            os.close(output_theirs)
        ours.setblocking(False)
        os.set_blocking(self.output_fd, False)
        self.connection = ours
        self.output = Output()
        self.reader = FrameReader()
        self.ready = False
        self.making = ""
        self.deadline: float | None = None
        self.started = time.monotonic()
        self._unsent = memoryview(b"")

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def sending(self) -> bool:
        """Whether a message waits for room in the socket."""
        return len(self._unsent) > 0

    def send(self, message: object) -> None:
        """Send a message, or as much of it as the socket takes now. A worker that is gone is noticed by `receive`."""
        self._unsent = memoryview(frame(message))
        self.flush()

    def flush(self) -> None:
        """Send more of the waiting message."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                try:
                    self._unsent = self._unsent[self.connection.send(self._unsent) :]
                except (BrokenPipeError, ConnectionResetError):
                    self._unsent = memoryview(b"")

    def receive(self) -> tuple[bytes, bool]:
        """What has arrived, and whether more can: False once the worker has closed its end."""
        pieces: list[bytes] = []
        try:
            while piece := self.connection.recv(READ_BYTES):
                pieces.append(piece)
        except BlockingIOError:
            return b"".join(pieces), True
        except ConnectionResetError:
            pass  # it ended with something of ours unread, which is an end as well
        return b"".join(pieces), False

    def drain_output(self) -> bool:
        """Read what the worker has printed, at most a bounded amount at a time: it may print for ever.

        False if nobody can print any more.
        """
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):
                piece = os.read(self.output_fd, READ_BYTES)
                if not piece:
                    return False
                self.output.add(piece)
        return True

    def exit_code(self, wait: float = 0.0) -> int | None:
        """How the process ended, or None if it still runs after `wait` seconds.

        It is not reaped, so that the number of its process group cannot be given to another one before `end`.
        """
        until = time.monotonic() + wait
        while (code := self._exit_code()) is None and time.monotonic() < until:
            time.sleep(0.002)
        return code

    def _exit_code(self) -> int | None:
        if self.process.returncode is not None or not hasattr(os, "waitid"):
            return self.process.poll()
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def end(self) -> int | None:
        """Kill the process and all that it started, reap it, and close everything. Returns its exit code, if it is
        known."""
        if self.process.returncode is None:
            end_tree(self.pid)
        self.connection.close()
        for descriptor in (self._lifeline, self.output_fd):
            os.close(descriptor)
        # A process in an uninterruptible wait dies when the wait is over; the run does not wait with it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout=5)
        return None


def worker_environment() -> dict[str, str]:
    """The parent's environment, with one thread for numeric libraries and a fixed order of sets of strings."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "it hung up"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
