"""What torch's profiler sees in one process: operators and kernels by stage, and a trace for a viewer.

For the controller and for workers in other processes. There is one recording a process: of the workers that share one,
the first records for all of them.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

OUTSIDE_OF_OPERATORS = "(Python and other code)"
"""What the time of a stage is called in which no operator ran, in the thread of the stage."""

_LABEL = "stage: "
_lock = threading.Lock()
_recording: Any = None


@dataclass
class Operator:
    """An operator or a kernel in one stage. Nanoseconds: on the CPU without what it called, and on the device."""

    name: str
    stage: str
    calls: int = 0
    cpu_ns: int = 0
    device_ns: int = 0


@dataclass
class Capture:
    """What one process did. trace: a Chrome trace as compressed JSON; num_left_out: events that are not in it;
    peak_bytes: the most memory that its device has held, None where nobody asked."""

    process: str
    operators: list[Operator] = field(default_factory=list)
    trace: bytes = b""
    num_events: int = 0
    num_left_out: int = 0
    peak_bytes: int | None = None


Stretch = tuple[str, int, int]
"""A stage by name, and when it began and ended, in nanoseconds."""


def start(activities: Sequence[Any] = ()) -> bool:
    """Begin to record this process; False if somebody has begun already. `activities`: of torch's profiler, beside the
    CPU's."""
    global _recording
    with _lock:
        if _recording is not None:
            return False
        recording = profile(activities=[ProfilerActivity.CPU, *activities], **_all_threads())
        recording.start()
        _recording = recording
        return True


def stop(stages: Sequence[Stretch], max_events: int) -> Capture | None:
    """End the recording of this process and say what it saw; None if there is none. `stages`: to tell operators by."""
    global _recording
    with _lock:
        recording, _recording = _recording, None
    if recording is None:
        return None
    recording.stop()
    events = [_Event(event) for event in recording.profiler.kineto_results.events()]
    kept = min(len(events), max_events)
    trace = _trace(recording) if kept == len(events) else _first(events, kept)
    return Capture(
        process=f"{socket.gethostname()}:{os.getpid()}",
        operators=_operators(events, stages),
        trace=trace,
        num_events=len(events),
        num_left_out=len(events) - kept,
    )


@contextlib.contextmanager
def labelled(name: str) -> Iterator[int]:
    """A stretch that traces show under this name; gives the time at which it began."""
    with torch.profiler.record_function(f"{_LABEL}{name}"):
        yield time.time_ns()


def _all_threads() -> dict[str, Any]:
    """The setting by which threads that others start are recorded too, where this torch has it."""
    try:
        from torch._C._profiler import _ExperimentalConfig

        return {"experimental_config": _ExperimentalConfig(profile_all_threads=True)}
    except (ImportError, TypeError):
        return {}


class _Event:
    """The fields of an event of torch's profiler; its own Python form of them takes fifty times as long to make."""

    __slots__ = ("correlation", "device", "end", "link", "name", "on_device", "skipped", "start", "thread")

    def __init__(self, event: Any) -> None:
        self.name: str = event.name()
        self.start: int = event.start_ns()
        self.end: int = self.start + event.duration_ns()
        self.on_device: bool = event.device_type().name != "CPU"
        self.device: int = event.device_index()
        self.thread: int = event.device_resource_id() if self.on_device else event.start_thread_id()
        self.correlation: int = event.correlation_id()
        self.link: int = event.linked_correlation_id()
        self.skipped: bool = event.is_async() or (self.on_device and event.is_user_annotation())


def _operators(events: Sequence[_Event], stages: Sequence[Stretch]) -> list[Operator]:
    """Time by stage and name: on the CPU in every thread by itself, on devices by what started it."""
    found: dict[tuple[str, str], Operator] = {}
    starts: dict[int, Operator] = {}
    stage_of = _StageOf(stages)

    def operator(name: str, stage: str) -> Operator:
        return found.setdefault((stage, name), Operator(name, stage))

    open_: list[tuple[_Event, Operator]] = []
    here = sorted((e for e in events if not e.on_device and not e.skipped), key=lambda e: (e.thread, e.start, -e.end))
    for event in here:
        while open_ and (open_[-1][0].thread != event.thread or open_[-1][0].end <= event.start):
            open_.pop()
        stage = event.name.removeprefix(_LABEL) if event.name.startswith(_LABEL) else None
        mine = operator(event.name, stage_of(event.start)) if stage is None else operator(OUTSIDE_OF_OPERATORS, stage)
        mine.calls += 1
        mine.cpu_ns += event.end - event.start
        if open_:
            open_[-1][1].cpu_ns -= min(event.end, open_[-1][0].end) - event.start
        open_.append((event, mine))
        starts[event.correlation] = mine
    for event in events:
        if event.on_device and not event.skipped:
            mine = starts.get(event.link) or operator(event.name, stage_of(event.start))
            mine.device_ns += event.end - event.start
    return list(found.values())


class _StageOf:
    """Which stage a moment lies in; empty for none. Of stages that overlap, the one that began last."""

    def __init__(self, stages: Sequence[Stretch]) -> None:
        self._stages = sorted(stages, key=lambda stage: stage[1])
        self._starts = [stage[1] for stage in self._stages]

    def __call__(self, moment: int) -> str:
        place = bisect_right(self._starts, moment) - 1
        for name, _, end in reversed(self._stages[max(0, place - 2) : place + 1]):
            if moment <= end:
                return name
        return ""


def _trace(recording: Any) -> bytes:
    """What torch writes for viewers, compressed."""
    with tempfile.TemporaryDirectory(prefix="rollstock-profile-") as folder:
        path = Path(folder) / "trace.json"
        recording.export_chrome_trace(str(path))
        return gzip.compress(path.read_bytes(), compresslevel=5)


def _first(events: Sequence[_Event], count: int) -> bytes:
    """The same with the first `count` events alone: name, time and thread of each."""
    rows = [
        {
            "ph": "X",
            "name": event.name,
            "cat": "kernel" if event.on_device else "cpu_op",
            "ts": event.start / 1e3,
            "dur": (event.end - event.start) / 1e3,
            "pid": f"device {event.device}" if event.on_device else os.getpid(),
            "tid": event.thread,
        }
        for event in sorted(events, key=lambda event: event.start)[:count]
    ]
    return gzip.compress(json.dumps({"displayTimeUnit": "ms", "traceEvents": rows}).encode(), compresslevel=5)
