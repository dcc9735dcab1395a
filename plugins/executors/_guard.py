"""Ends what a Ray that was started here leaves behind when the controller is killed.

For the `ray` executor. Ray ends its own processes when its driver dies, all but two agents that wait for the end of a
pipe which each keeps open for the other. A process that does nothing but wait for the end of the controller ends those.
It knows them by id and start time, so that no other process is taken for one of them. Linux only, where /proc tells.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PATIENCE_S = 5.0  # in which Ray may end its processes by itself


class Guard:
    """The waiting process. `watch` says what is to end with the controller, `close` that all ended in order."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        if Path("/proc/self/stat").exists():
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", __file__], stdin=subprocess.PIPE, text=True, start_new_session=True
            )

    def watch(self) -> None:
        """Watch all processes that were started below this one until now."""
        if self._process is not None:
            self._say({pid: start for pid, start in descendants(os.getpid()).items() if pid != self._process.pid})

    def close(self) -> None:
        """End the guard; whatever it watched is left alone."""
        if self._process is not None:
            self._say({})
            with contextlib.suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _say(self, watched: dict[int, str]) -> None:
        with contextlib.suppress(OSError):  # somebody ended the guard
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(watched) + "\n")
            self._process.stdin.flush()


def descendants(pid: int) -> dict[int, str]:
    """The processes below one, each with its start time."""
    found: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (about := _about(int(path.name))) is not None:
            found[int(path.name)] = about
    below = {pid}
    while more := {number for number, (parent, _) in found.items() if parent in below} - below:
        below |= more
    return {number: found[number][1] for number in below - {pid} if number in found}


def _about(pid: int) -> tuple[int, str] | None:
    """Parent and start time of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), fields[19]


def main() -> None:
    """Wait for the end of the input, and then end what was watched last."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the controller ends in order, and then says so
    watched: dict[str, str] = {}
    for line in sys.stdin:
        watched = json.loads(line)
    if watched:
        time.sleep(_PATIENCE_S)
    for pid, start in watched.items():
        about = _about(int(pid))
        if about is not None and about[1] == start:
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
