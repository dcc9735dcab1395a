"""Workers as a profiled run sees them: every call is timed, and passed on as it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rollstock.interfaces.executor import WorkerGroup

Note = Callable[[str, int, int], None]
"""Takes the name of a call, and when it began and ended, in nanoseconds."""


class TimedGroup(WorkerGroup):
    """The workers of a role. What else the group can do is reached through it."""

    def __init__(self, role: str, group: WorkerGroup, note: Note) -> None:
        self.role = role
        self.group = group
        self._note = note

    @property
    def size(self) -> int:
        """See `WorkerGroup.size`."""
        return self.group.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `WorkerGroup.call`."""
        began = time.time_ns()
        try:
            return self.group.call(method, *args, **kwargs)
        finally:
            self._note(f"{self.role}.{method}", began, time.time_ns())

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `WorkerGroup.submit`; the call lasts until its result is there."""
        began = time.time_ns()
        future = self.group.submit(method, *args, **kwargs)
        future.add_done_callback(lambda _: self._note(f"{self.role}.{method}", began, time.time_ns()))
        return future
