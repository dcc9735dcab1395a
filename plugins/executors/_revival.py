"""Lost processes started again: their workers built, brought up to date, and only then given anything to do.

For the `ray` executor. Whether a call is made again is `_calls`', and what a trained role had learned is loaded by the
core.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from threading import Event
from typing import Any

from rollstock import Metric, Metrics, Run, RunError, WorkerLostError
from rollstock.plugins.executors._calls import reason
from rollstock.plugins.executors._group import RayGroup
from rollstock.plugins.executors._process import Process

logger = logging.getLogger(__name__)
_ANSWER_S = 2.0  # in which a process that is lost has shown it; others may be busy


class Revival:
    """Knows all groups of an executor, in the order in which they were started, and the run that they serve."""

    def __init__(self, ended: Event, *, patience_s: float) -> None:
        """ended: set when nobody waits any more; patience_s: how long to wait for room."""
        self.groups: dict[str, RayGroup] = {}
        self.run: Run | None = None
        self.ray: Any = None
        self.open_log: Callable[[Process], Any] = lambda process: None
        self._ended = ended
        self._patience_s = patience_s
        self._lock = threading.RLock()
        self._telling = threading.Lock()
        self._holder: int | None = None

    def is_mine(self) -> bool:
        """Whether this very thread is bringing workers up to date."""
        return self._holder == threading.get_ident()

    def count(self, metrics: Metrics) -> None:
        """Put something into the run's metrics."""
        if self.run is not None:
            self.run.record_event(metrics)

    def may_replace(self, process: Process) -> bool:
        """Whether a process can be started again while calls go on: once the run has begun, if no role that lives there
        has a state, nor where its companions live."""
        companions = self._with_companions([process])
        return self.run is not None and all(group.spec.stateless for p in companions for group in self._living_in(p))

    def tell_lost(self, process: Process, generation: int, error: WorkerLostError) -> None:
        """Mark a process as lost, and tell those who listen; once for each time that it was started."""
        with self._telling:
            if process.is_lost or process.generation != generation:
                return
            process.is_lost = True
        if self.run is not None:
            hook = self.run.manager.hook
            hook.rollstock_worker_failed(run=self.run, role=error.role, rank=error.rank, error=error)

    def revive(self, processes: Sequence[Process]) -> None:
        """Start those again that are lost, and those that cannot do without them. Whoever else wants the same waits.

        Raises WorkerLostError if one of them was lost again, or if what another role holds is lost.
        """
        with self.working():
            lost = self._with_companions([process for process in processes if process.is_lost])
            if not lost:
                return
            began = time.monotonic()
            self.welcome(self._rebuild(lost))
            for process in lost:
                process.is_lost = False
            seconds = time.monotonic() - began
            logger.warning("started again: %s, in %.1f s", ", ".join(process.label for process in lost), seconds)
            self.count({"recovery/num_replaced": Metric(float(len(lost)), 1.0, "sum")})

    def recover(self, roles: Collection[str]) -> dict[str, list[int]]:
        """See `Executor.recover`."""
        with self.working():
            everyone = list(dict.fromkeys(process for group in self.groups.values() for process in group.processes))
            self._find_lost(everyone)
            asked = [process for role in roles if role in self.groups for process in self.groups[role].processes]
            lost = self._with_companions([*(process for process in everyone if process.is_lost), *asked])
            rebuilt = self._rebuild(lost)
            for process in lost:
                process.is_lost = False
            self.count({"recovery/num_replaced": Metric(float(len(lost)), 1.0, "sum")})
            return rebuilt

    def welcome(self, rebuilt: Mapping[str, Sequence[int]]) -> None:
        """Let workers that were built be brought up to date, by whoever has something for them."""
        for role, ranks in rebuilt.items():
            for rank in ranks:
                assert self.run is not None
                self.run.manager.hook.rollstock_worker_started(run=self.run, role=role, rank=rank)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Be the only one who starts and ends processes."""
        with self._lock:
            before, self._holder = self._holder, threading.get_ident()
            try:
                yield
            finally:
                self._holder = before

    def is_alone(self, group: RayGroup) -> bool:
        """Whether no other role lives in the processes of a group."""
        return all(self._living_in(process) == [group] for process in group.processes)

    def _living_in(self, process: Process) -> list[RayGroup]:
        return [group for group in self.groups.values() if process in group.processes]

    def _with_companions(self, lost: Sequence[Process]) -> list[Process]:
        """These, and all processes of a role whose workers work together with one of them."""
        found = list(dict.fromkeys(lost))
        for process in found:  # which grows
            for group in self._living_in(process):
                if group.spec.together:
                    found += [other for other in group.processes if other not in found]
        return found

    def _find_lost(self, processes: Sequence[Process]) -> None:
        """Mark those that died without anyone having noticed."""
        asked = {process.actor.where.remote(): process for process in processes if not process.is_lost}
        ready, _ = self.ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
        for ref in ready:
            process = asked[ref]
            try:
                self.ray.get(ref)
            except self.ray.exceptions.RayError as error:
                group = self._living_in(process)[0]
                rank = group.processes.index(process)
                told = WorkerLostError(f"{group.role} worker {rank} died: {reason(error)}", group.role, rank)
                self.tell_lost(process, process.generation, told)

    def _rebuild(self, processes: Sequence[Process]) -> dict[str, list[int]]:
        """Start processes again and build the workers that live there; returns their ranks by role."""
        for process in processes:
            process.is_lost = True  # until the workers in it are up to date
            process.end(self.ray)
        for process in processes:
            process.start(self.ray)
        self.await_start(processes)
        rebuilt: dict[str, list[int]] = {}
        for role, group in self.groups.items():
            ranks = [rank for rank, process in enumerate(group.processes) if process in processes]
            if ranks:
                rebuilt[role] = ranks
                try:
                    group.build(ranks)
                except self.ray.exceptions.RayError as error:
                    raise WorkerLostError(f"{role}: lost while it was built: {reason(error)}", role, 0) from error
        for role in rebuilt:
            self.groups[role].finish()
        for process in processes:
            if process.log:
                self.open_log(process)
        return rebuilt

    def await_start(self, processes: Sequence[Process]) -> None:
        """Wait until processes answer. Raises RunError if there is no room, WorkerLostError if one ended at once."""
        began = time.monotonic()
        asked = {process.actor.where.remote(): process for process in processes}
        waiting = list(asked)
        while waiting:
            ready, waiting = self.ray.wait(waiting, num_returns=len(waiting), timeout=1.0)
            for ref in ready:
                process = asked[ref]
                try:
                    process.pid, process.address, process.node = self.ray.get(ref)
                except self.ray.exceptions.RayError as error:
                    group = self._living_in(process)[0]
                    text = f"{process.label} ended while it was started again: {reason(error)}"
                    raise WorkerLostError(text, group.role, group.processes.index(process)) from error
            if waiting and self._ended.is_set():
                raise RunError("workers were ended while they were started again")
            if waiting and time.monotonic() - began > self._patience_s:
                names = ", ".join(asked[ref].label for ref in waiting)
                raise RunError(
                    f"no room in the Ray cluster to start {names} again, after {self._patience_s:.0f} s "
                    "(executor.start_timeout_s)"
                )
