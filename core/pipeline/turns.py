"""Workers that two threads call: one call at a time, in the order in which they were asked for.

For pipelines that generate while the run trains. A generator that asks again and again would keep a lock of Python's to
itself; here whoever came first goes first, so that new weights reach the generators between two of its requests.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

from rollstock.errors import RunError
from rollstock.interfaces.executor import WorkerGroup
from rollstock.interfaces.scheduler import WorkerLoad


class Turns:
    """A lock that serves threads in the order of their coming; a thread that has it may take it again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._owner: int | None = None
        self._depth = 0
        self._is_over = False

    def __enter__(self) -> Turns:
        me = threading.get_ident()
        with self._changed:
            if self._owner == me:
                self._depth += 1
                return self
            ticket = object()
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._is_over or (self._owner is None and self._waiting[0] is ticket))
                if self._owner is not None:
                    raise RunError("the workers are being ended")
                self._owner, self._depth = me, 1
            finally:  # a signal may have ended the wait: whoever is next must not wait for this thread
                self._waiting.remove(ticket)
                self._changed.notify_all()
        return self

    def __exit__(self, *_exception: object) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
                self._changed.notify_all()

    def end(self) -> None:
        """Let nobody wait any more: who does, and finds another thread at work, gets a RunError."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    @property
    def is_anothers(self) -> bool:
        """Whether another thread has it now."""
        return self._owner not in (None, threading.get_ident())


class SharedGroup(WorkerGroup):
    """The workers of a role, whose calls take turns. Whatever else the group can do is passed on as it is."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.role = group.role
        self.turns = Turns()
        self.is_abandoned = False
        """Set when nobody waits any more: workers that are still busy are then left to the executor to end."""

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._group.size

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `WorkerGroup.call`."""
        if method == "close" and self.is_abandoned:  # without a turn: whoever had one may have been ended in the middle
            return None if self.turns.is_anothers else self._group.call(method, *args, **kwargs)
        with self.turns:
            return self._group.call(method, *args, **kwargs)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `WorkerGroup.submit`; what is sent before the next turn is done before it."""
        with self.turns:
            return self._group.submit(method, *args, **kwargs)

    def member(self, rank: int) -> WorkerGroup:
        """See `WorkerGroup.member`. A worker that is started within a call is told things before that call ends, so
        this waits for no turn."""
        return self._group.member(rank)

    @property
    def can_resize(self) -> bool:
        """See `WorkerGroup.can_resize`."""
        return self._group.can_resize

    def resize(self, count: int) -> int:
        """See `WorkerGroup.resize`."""
        with self.turns:
            return self._group.resize(count)

    def load(self) -> WorkerLoad | None:
        """See `WorkerGroup.load`."""
        return self._group.load()
