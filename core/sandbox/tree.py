"""Ending a process together with everything that it started.

A process group is not enough: a child that called `setsid` has left it. On Linux the worker is stopped first, so that
it can start nothing more, and its descendants are found in /proc (a worker adopts the orphans among them); elsewhere
the group is all there is.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def end_tree(pid: int) -> None:
    """Kill the child process `pid`, which leads a process group of its own, and its descendants. It is not reaped."""
    if (PROC / str(pid)).exists():
        _signal(pid, signal.SIGSTOP)
        # A descendant may start another while the table is read; each round leaves fewer that could.
        for _ in range(20):
            alive = list(descendants(pid))
            if not alive:
                break
            for child in alive:
                _signal(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _signal(pid, signal.SIGKILL)


def descendants(pid: int) -> Iterator[int]:
    """The ids of the living processes below `pid`, as /proc shows them now; nothing where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if not entry.name.isdigit():
            continue
        try:
            # "pid (name) state parent ...", and the name may hold spaces and brackets.
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it ended while the list was read
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry.name))
    pending = [pid]
    while pending:
        for child in children.get(pending.pop(), ()):
            pending.append(child)
            yield child


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
