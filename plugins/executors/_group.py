"""The controller's side of the workers of one role in Ray: calls sent, waited for, and their failures explained.

For the `ray` executor, which starts the processes. What runs in them is `_host`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from rollstock import RunError, WorkerGroup, WorkerSpec
from rollstock.dispatch import Shares, gather, registration, split_call
from rollstock.plugins.executors._host import Pending, Reply
from rollstock.plugins.executors._parcel import Parcel

logger = logging.getLogger(__name__)

INLINE_BYTES = 64 << 10
"""What is smaller travels with the call itself; what is larger is put into the object store once for all."""


class WorkerDiedError(RunError):
    """The process of a worker is gone."""

    def __init__(self, message: str, role: str, rank: int) -> None:
        super().__init__(message)
        self.role, self.rank = role, rank


class _RemoteTraceback(Exception):  # noqa: N818  # it is a cause, and never raised by itself
    """Where in the worker's process an error was raised; stands as its cause."""

    def __str__(self) -> str:
        return f"in the worker:\n{self.args[0]}"


@dataclass
class Process:
    """One actor, and what is known of it. `log`: the file that it writes, once there is one."""

    actor: Any
    label: str
    pid: int = 0
    address: str = ""
    log: str = ""


@dataclass(eq=False)
class Sent(Future[Any]):
    """A call on its way: the future of its result, and what Ray will hand to workers in place of it."""

    refs: list[Any]
    shares: Shares
    earlier: list[Sent] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()


class RayGroup(WorkerGroup):
    """The workers of a role, one in each process."""

    def __init__(
        self,
        role: str,
        processes: Sequence[Process],
        ray: Any,
        threads: ThreadPoolExecutor,
        *,
        ended: Event,
        patience: float,
    ) -> None:
        """ended: set when nobody waits any more; patience: seconds after which a wait is logged. The workers are there
        after `build` and `finish`."""
        self.role = role
        self.processes = list(processes)
        self._ray = ray
        self._threads = threads
        self._ended = ended
        self._patience = patience
        self._worker_class: type = object
        self._ranks: list[int] = list(range(len(processes)))
        self._building: list[Any] = []
        self._left: Future[Any] | None = None
        self._has_died = False
        self.on_death: Callable[[WorkerDiedError], None] = lambda error: None

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.processes)

    def build(self, spec: WorkerSpec) -> None:
        """Ask the processes to build the workers."""
        variables: dict[str, str] = {}
        if spec.count > 1:
            address, port = self._ray.get(self.processes[0].actor.meeting_point.remote())
            variables = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(spec.count)}
        parcel = Parcel.pack((spec.factory, dict(spec.kwargs), spec.count))
        for rank, process in enumerate(self.processes):
            own = {**variables, "RANK": str(rank)} if variables else {}
            self._building.append(process.actor.build.remote(self.role, rank, parcel, own))

    def finish(self) -> None:
        """Wait until the workers are built. Raises what a factory raised."""
        building, self._building = self._building, []
        found = [reply.value for reply in self._replies(building, "start")]
        self._worker_class = found[0][0]
        self._ranks = [rank for _, rank, _ in found]
        for process, (_, _, where) in zip(self.processes, found, strict=True):
            process.pid, process.address = where

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `WorkerGroup.call`. The caller may be interrupted while it waits; the workers finish what they do."""
        if method == "close" and (self._has_died or (self._left is not None and not self._left.done())):
            return None  # there is nobody to tell, or a call that was broken off is to end first: `shutdown` does it
        sent = self._send(method, args, kwargs)
        if not sent.shares.marker.sync:
            return sent
        try:
            return sent.result()
        except BaseException as error:
            if not sent.done():
                self._left = sent
            if isinstance(error, WorkerDiedError):
                self.on_death(error)
            raise

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `WorkerGroup.submit`."""
        return self._send(method, args, kwargs)

    def _send(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sent:
        """Call every worker that takes part; each process answers its calls in the order in which they were sent."""
        marker = registration(self._worker_class, method, self.role)
        args, earlier = self._resolve(args, marker.dispatch in ("scatter", "data_parallel"))
        shares = split_call(marker, self._ranks, args)
        parcel = Parcel.pack((args, kwargs))
        payload = self._ray.put(parcel) if parcel.num_bytes > INLINE_BYTES else parcel
        before = [ref for sent in earlier for ref in sent.refs]
        refs = [
            self.processes[rank].actor.call.remote(
                self.role, rank, method, rank in shares.answering, shares.part(rank), payload, *before
            )
            for rank in range(shares.num_ranks)
        ]
        sent = Sent(refs, shares, earlier)
        self._threads.submit(self._finish, sent, method)
        return sent

    def _resolve(self, args: tuple[Any, ...], splits: bool) -> tuple[tuple[Any, ...], list[Sent]]:
        """The arguments with a place for each result of an earlier call, which its workers send to ours directly. What
        is to be split must be looked at here first."""
        earlier: list[Sent] = []
        found: list[Any] = []
        for number, arg in enumerate(args):
            if isinstance(arg, Sent) and not (splits and number == 0):
                start = sum(len(sent.refs) for sent in earlier)
                earlier.append(arg)
                found.append(Pending(start, start + len(arg.refs), _without_arguments(arg.shares)))
            else:
                found.append(arg.result() if isinstance(arg, Future) else arg)
        return tuple(found), earlier

    def _finish(self, sent: Sent, method: str) -> None:
        """Wait for the replies of a call and complete its future."""
        try:
            with self._blamed(sent):
                values = [reply.result for reply in self._replies(sent.refs, method)]
                sent.set_result(gather(values, sent.shares))
        except BaseException as error:  # whatever it is belongs to whoever waits
            sent.set_exception(error)

    @contextlib.contextmanager
    def _blamed(self, sent: Sent) -> Iterator[None]:
        """Raise the error of an earlier call, whose result this one waits for, before its own."""
        try:
            yield
        except Exception:
            for before in sent.earlier:
                before.result()
            raise

    def _replies(self, refs: Sequence[Any], method: str) -> list[Reply]:
        """The workers' replies by rank. The first error that is seen is raised, without waiting for the others: they
        may be waiting for the worker that failed."""
        ray, began, patience = self._ray, time.monotonic(), self._patience
        ranks = {ref: rank for rank, ref in enumerate(refs)}
        replies: dict[int, Reply] = {}
        pending = list(refs)
        while pending:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=1.0)
            try:
                parcels = ray.get(ready)
            except ray.exceptions.RayError:
                parcels = [self._fetch(ref, ranks[ref], method) for ref in ready]
            for ref, parcel in zip(ready, parcels, strict=True):
                replies[ranks[ref]] = self._read(parcel, ranks[ref])
            if pending and self._ended.is_set():
                raise RunError(f"{method!r} of {self.role} was broken off: its workers were ended")
            waited = time.monotonic() - began
            if pending and waited > patience:
                names = ", ".join(self.processes[ranks[ref]].label for ref in pending)
                logger.warning("waiting for %r of %s since %.0f s", method, names, waited)
                patience *= 2
        return [replies[rank] for rank in sorted(replies)]

    def _fetch(self, ref: Any, rank: int, method: str) -> Any:
        """One reply by itself. Raises RunError for what went wrong outside of the worker."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayActorError as error:
            raise self._died(rank, method, error) from error
        except self._ray.exceptions.RayError as error:
            text = " ".join(str(error).split())
            raise RunError(f"{method!r} of {self.role} worker {rank} failed in Ray: {text}") from error

    def _read(self, parcel: Parcel, rank: int) -> Reply:
        """A reply, its messages logged. Raises what the worker raised."""
        reply: Reply = parcel.unpack()
        for name, level, text in reply.records:
            logging.getLogger(name).log(level, "%s %d: %s", self.role, rank, text)
        if reply.error is not None:
            raise reply.error from _RemoteTraceback(reply.trace)
        return reply

    def _died(self, rank: int, method: str, error: Exception) -> WorkerDiedError:
        self._has_died = True
        process = self.processes[rank]
        place = f" (process {process.pid} on {process.address})" if process.pid else ""
        log = f"; its log is {process.log}" if process.log else ""
        return WorkerDiedError(
            f"{self.role} worker {rank}{place} died during {method!r}: {_reason(error)}{log}", self.role, rank
        )


def _without_arguments(shares: Shares) -> Shares:
    """What `gather` needs of a call, without what it was called with."""
    return Shares(shares.marker, (), shares.num_ranks, shares.indices, shares.answering)


def _reason(error: Exception) -> str:
    """Why Ray says that a process ended, without the advice around it."""
    text = " ".join(str(error).split())
    _, _, detail = text.rpartition("Worker exit detail: ")
    detail = detail.partition(" Some common causes include")[0].rstrip(".")
    if detail.endswith("End of file"):  # all that shows of a process that had no time to say anything
        return "it was killed (by somebody, or by the system for want of memory) or it crashed"
    return detail
