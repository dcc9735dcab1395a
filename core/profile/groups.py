"""Calls of workers, timed while a run is profiled: `call` and `submit` of each group are replaced, and put back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rollstock.interfaces.executor import WorkerGroup

Note = Callable[[str, int, int], None]
"""Takes the name of a call, and when it began and ended, in nanoseconds."""


@contextmanager
def timed(groups: Iterable[WorkerGroup], note: Note) -> Iterator[None]:
    """Have every call of the groups noted, whoever makes it: on the groups themselves, since others than the run may
    hold them."""
    watched = list(groups)
    for group in watched:
        vars(group).update(call=_noted_call(group, note), submit=_noted_submit(group, note))
    try:
        yield
    finally:
        for group in watched:
            for method in ("call", "submit"):
                vars(group).pop(method, None)


def _noted_call(group: WorkerGroup, note: Note) -> Callable[..., Any]:
    call = group.call

    def noted(method: str, *args: Any, **kwargs: Any) -> Any:
        began = time.time_ns()
        try:
            return call(method, *args, **kwargs)
        finally:
            note(f"{group.role}.{method}", began, time.time_ns())

    return noted


def _noted_submit(group: WorkerGroup, note: Note) -> Callable[..., Any]:
    """The call lasts until its result is there."""
    submit = group.submit

    def noted(method: str, *args: Any, **kwargs: Any) -> Any:
        began = time.time_ns()
        future = submit(method, *args, **kwargs)
        future.add_done_callback(lambda _: note(f"{group.role}.{method}", began, time.time_ns()))
        return future

    return noted
