"""SIGINT and SIGTERM, turned into an orderly end.

A signal ends a stage that has changed nothing yet at once, and waits for the end of the step in any other, so that the
state that a checkpoint then gets is always that of a finished step. A second SIGINT ends the process without a
checkpoint.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class InterruptedRun(BaseException):
    """A signal asked for the end; not an Exception, so that no plugin swallows it by accident."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


class Interrupt:
    """Handles the signals of one run while it is installed; a context manager."""

    def __init__(self) -> None:
        self._pending: str = ""
        self._allowed = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_exception: object) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set from Python

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._pending and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._pending = signal.Signals(number).name
        if self._allowed > 0:
            raise InterruptedRun(self._pending)

    def check(self) -> None:
        """Raise InterruptedRun if a signal has come."""
        if self._pending:
            raise InterruptedRun(self._pending)

    def check_if_allowed(self) -> None:
        """The same, in a stretch that a signal may end."""
        if self._allowed > 0:
            self.check()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """A stretch that a signal may end at any instruction."""
        self._allowed += 1
        try:
            self.check()
            yield
        finally:
            self._allowed -= 1

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A stretch that a signal must not end; it shows at the next check."""
        kept, self._allowed = self._allowed, 0
        try:
            yield
        finally:
            self._allowed = kept
