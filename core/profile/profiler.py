"""The profiler of a run, as hooks around its stages.

Registered outermost, so that what extensions do in a stage is in its time. It records from the first stage of the
first chosen step to the end of the last one, and then writes `profile/` in the run's directory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstock.errors import RunError
from rollstock.hookspecs import hookimpl
from rollstock.interfaces.device import Device
from rollstock.metrics import Metric, Metrics
from rollstock.profile import capture
from rollstock.profile.capture import Capture
from rollstock.profile.groups import timed
from rollstock.profile.spans import ELSEWHERE, Spans
from rollstock.profile.table import Summary, summarise, write

if TYPE_CHECKING:
    from rollstock.batch import Batch
    from rollstock.interfaces.environment import Task
    from rollstock.interfaces.executor import WorkerGroup
    from rollstock.run import Run

FOLDER = "profile"

logger = logging.getLogger(__name__)


class StepProfiler:
    """Profiles the steps `first` to `last` of the run that it is registered in. `summary` is there after them."""

    def __init__(self, first: int, last: int, *, max_events: int) -> None:
        self.first, self.last = first, last
        self.max_events = max_events
        self.summary: Summary | None = None
        self._active = False
        self._spans = Spans()
        self._peaks: dict[str, int] = {}
        self._highest = 0
        self._device: Device[Any] | None = None
        self._recorded: list[str] = []
        self._stage = threading.local()
        self._timing = contextlib.ExitStack()
        self._first_taken = first
        self._in_this_process = True
        self._finish_began = 0
        self._ended = 0

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_generate(self, run: Run, tasks: Sequence[Task]) -> Generator[None, Any, Any]:
        """Time the stage; the first of the chosen steps begins here."""
        if self.summary is None and not self._active and self.first <= run.step <= self.last:
            self._begin(run)
        with self._timed("generate"):
            return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_score(self, run: Run, batch: Batch) -> Generator[None, Any, Any]:
        """Time the stage."""
        with self._timed("score"):
            return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_select(self, run: Run, batch: Batch) -> Generator[None, Any, Any]:
        """Time the stage."""
        with self._timed("select"):
            return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_prepare(self, run: Run, batch: Batch) -> Generator[None, Any, Any]:
        """Time the stage."""
        with self._timed("prepare"):
            return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_advantages(self, run: Run, batch: Batch) -> Generator[None, Any, Any]:
        """Time the stage."""
        with self._timed("advantages"):
            return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_update(self, run: Run, batch: Batch) -> Generator[None, Any, Any]:
        """Time the stage."""
        with self._timed("update"):
            return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_sync(self, run: Run) -> Generator[None, Any, Any]:
        """Time the stage."""
        with self._timed("sync"):
            return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_metrics(self, run: Run, step: int, metrics: Metrics) -> Generator[None, Any, Any]:
        """From here on a step is being finished. The peak of memory stays that of the run, though stages reset it."""
        result = yield
        name = "perf/peak_memory_gib"
        if name in metrics and self._highest:
            metrics[name] = metrics[name].merge(Metric(self._highest / 2**30, 1.0, "max"))
        if self._active:
            self._finish_began = time.time_ns()
        return result

    @hookimpl(tryfirst=True)
    def rollstock_evaluation_end(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation began with the first call of a worker after a step, and is no part of it."""
        calls = [span for span in self._spans.calls if span.stage != ELSEWHERE]
        began = [span.start for span in calls if self._finish_began and span.start >= self._finish_began]
        if self._active and began:
            self._spans.add_stage("finish", self._finish_began, min(began))
            self._finish_began = time.time_ns()
            self._spans.add_stage("evaluation", min(began), self._finish_began)

    @hookimpl(wrapper=True, tryfirst=True)
    def rollstock_step_end(self, run: Run, step: int, metrics: Mapping[str, float]) -> Generator[None, Any, Any]:
        """The end of a step; after the last chosen one the profile is written."""
        result = yield
        if self._active:
            self._ended = time.time_ns()
            self._spans.add_stage("finish", self._finish_began or self._ended, self._ended)
            self._finish_began = 0
            if step >= self.last:
                self._end(run, step)
        return result

    @hookimpl(tryfirst=True)
    def rollstock_checkpoint_saved(self, run: Run, step: int, path: Path) -> None:
        """A checkpoint between two of the steps is no part of them."""
        if self._active and self._ended:
            self._spans.add_stage("checkpoint", self._ended, time.time_ns())
            self._ended = 0

    @hookimpl
    def rollstock_run_end(self, run: Run, status: str) -> None:
        """A run that ends within the chosen steps has a profile of what it did until then."""
        if self._active:
            self._end(run, run.step)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if not self._active:
            yield
            return
        if self._device is not None:
            self._device.reset_peak_memory()
        with capture.labelled(name) as began:
            self._stage.name = name
            try:
                yield
            finally:
                self._stage.name = ""
                if self._device is not None:
                    self._device.synchronize()  # what a stage has started is its own
                    peak = self._device.memory().peak
                    self._peaks[name] = max(peak, self._peaks.get(name, 0))
                    self._highest = max(self._highest, peak)
                self._spans.add_stage(name, began, time.time_ns())

    def _begin(self, run: Run) -> None:
        """Record this process, and those of the workers that can."""
        self._first_taken = run.step
        self._in_this_process = run.executor.shares_memory
        if self._in_this_process:  # elsewhere the device is the workers', and none of this process's business
            self._device = run.manager.create_as(Device, run.config.device)
            self._highest = self._device.memory().peak
        capture.start(() if self._device is None else self._device.profiler_activities())
        self._recorded = [role for role, group in run.roles.items() if _starts(group)]
        self._stage.name = ""  # threads without one are others than the run's
        self._timing.enter_context(timed(run.roles.values(), self._note))
        self._active = True

    def _note(self, name: str, start: int, end: int) -> None:
        self._spans.add_call(name, start, end, getattr(self._stage, "name", ELSEWHERE))

    def _end(self, run: Run, step: int) -> None:
        self._active = False
        self._timing.close()
        roles = run.roles
        stages = [(span.name, span.start, span.end) for span in self._spans.stages]
        captures: dict[str, Capture] = {}
        mine = capture.stop(stages, self.max_events)
        if mine is not None:
            mine.peak_bytes = self._highest or None
            captures["controller"] = mine
        for role in self._recorded:
            for rank, found in enumerate(roles[role].call("stop_profile", stages, self.max_events)):
                if found is not None:
                    captures[f"{role}-{rank}"] = found
        self.summary = summarise(
            self._spans,
            captures,
            steps=(self._first_taken, step),
            peaks=self._peaks,
            unseen=sorted(role for role in roles if role not in self._recorded) if not self._in_this_process else [],
            in_this_process=self._in_this_process,
        )
        folder = run.directory / FOLDER
        steps = f"step {step}" if step == self._first_taken else f"steps {self._first_taken} to {step}"
        try:
            write(folder, self.summary, captures)
        except OSError as error:  # the run is worth more, and the tables are printed at its end
            logger.warning("the profile of %s cannot be written to %s: %s", steps, folder, error.strerror or error)
            return
        run.trackers.message(f"profile of {steps} written to {folder}")


def _starts(group: WorkerGroup) -> bool:
    """Begin to record the processes of a role; False where none of its workers records one of its own."""
    try:
        return any(group.call("start_profile"))
    except RunError:  # the role of an extension, or rewards, whose worker has no such method
        return False
