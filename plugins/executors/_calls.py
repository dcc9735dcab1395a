"""A call on its way to the workers of a role, and the wait for its end: with retries where workers have no state.

For the `ray` executor's groups, which send calls. Starting workers again is `_revival`'s.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollstock import RunError, WorkerLostError
from rollstock.dispatch import Shares
from rollstock.plugins.executors._host import Reply
from rollstock.plugins.executors._parcel import Parcel
from rollstock.plugins.executors._process import Process

if TYPE_CHECKING:
    from rollstock.plugins.executors._group import RayGroup

logger = logging.getLogger(__name__)
_TICK = 1.0  # seconds between two looks at what else may have happened
_PEERS_S = 30.0  # in which the loss of a machine has shown


class _RemoteTraceback(Exception):  # noqa: N818  # it is a cause, and never raised by itself
    """Where in the worker's process an error was raised; stands as its cause."""

    def __str__(self) -> str:
        return f"in the worker:\n{self.args[0]}"


@dataclass
class Part:
    """What one worker has of a call. ref: of its reply, None before it was sent; generation: of its process when this
    was sent; before: what Ray hands over of earlier calls; num_retries: how often it was sent again."""

    rank: int
    process: Process
    ref: Any = None
    generation: int = 0
    sent_at: float = 0.0
    before: list[Any] = field(default_factory=list)
    num_retries: int = 0


@dataclass(eq=False)
class Sent(Future[Any]):
    """A call on its way: the future of its result, and what it takes to send a part of it again.

    payload: its arguments, as Ray carries them; earlier: the calls whose results are among them. num_items: how many
    items are scattered; limit_s: seconds after which a worker that has its part is taken to hang, 0: never.
    is_last_try: for what is asked while a worker is brought up to date, where a lost worker is for whoever started it
    to deal with.
    """

    method: str
    shares: Shares
    payload: Any
    parts: list[Part]
    earlier: list[Sent] = field(default_factory=list)
    num_items: int = 0
    limit_s: float = 0.0
    is_last_try: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def refs(self) -> list[Any]:
        """What Ray will hand to other workers in place of the result: the workers' replies."""
        return [part.ref for part in self.parts]

    def earlier_refs(self) -> list[Any]:
        """What Ray hands over of the earlier calls, as it is now."""
        return [ref for sent in self.earlier for ref in sent.refs]


class Waiting:
    """Waits for the replies to a call. Parts that came to nothing, and those that were not sent since their process was
    being started again, are in a queue, ordered by when they are due."""

    def __init__(self, group: RayGroup, sent: Sent) -> None:
        self._group, self._sent, self._ray = group, sent, group.ray
        self._replies: dict[int, Reply] = {}
        self._began = time.monotonic()
        self._open = {i for i, part in enumerate(sent.parts) if part.ref is not None}
        self._due = [(self._began, i) for i in range(len(sent.parts)) if i not in self._open]
        self._patience = group.patience

    def replies(self) -> list[Reply]:
        """The workers' replies in the order of the parts. The first error that no retry can mend is raised without
        waiting for the others: they may be waiting for the worker that failed."""
        while self._open or self._due:
            self._send_due()
            refs = {self._sent.parts[i].ref: i for i in sorted(self._open)}
            ready: list[Any] = []
            if refs:
                ready, _ = self._ray.wait(list(refs), num_returns=len(refs), timeout=self._pause())
            elif self._due:
                self._group.ended.wait(self._pause())
            self._take([refs[ref] for ref in ready])
            if (self._open or self._due) and self._group.ended.is_set():
                raise RunError(f"{self._sent.method!r} of {self._group.role} was broken off: its workers were ended")
            self._end_hung()
            self._say_what_is_awaited()
        return [self._replies[i] for i in sorted(self._replies)]

    def _pause(self) -> float:
        """Seconds until there is something to look at."""
        return max(0.01, min([_TICK, *(when - time.monotonic() for when, _ in self._due[:1])]))

    def _take(self, ready: Sequence[int]) -> None:
        """Take what has come."""
        try:
            parcels = self._ray.get([self._sent.parts[i].ref for i in ready])
        except self._ray.exceptions.RayError:
            for i in ready:
                try:
                    parcel = self._ray.get(self._sent.parts[i].ref)
                except self._ray.exceptions.RayError as error:
                    self._failed(i, error)
                else:
                    self._read(i, parcel)
        else:
            for i, parcel in zip(ready, parcels, strict=True):
                self._read(i, parcel)

    def _read(self, i: int, parcel: Parcel) -> None:
        """A reply, its messages logged. Raises what the worker raised, unless the call can be made again."""
        reply: Reply = parcel.unpack()
        rank = self._sent.parts[i].rank
        for name, level, text in reply.records:
            logging.getLogger(name).log(level, "%s %d: %s", self._group.role, rank, text)
        if reply.error is None:
            self._replies[i] = reply
            self._open.discard(i)
            self._group.count_work(reply.seconds)
            return
        reply.error.__cause__ = _RemoteTraceback(reply.trace)
        if self._group.spec.together:
            self._look_for_lost_peers(i)
        if not isinstance(reply.error, ConnectionError) or not self._may_retry(i):
            raise reply.error
        lost = f"{self._group.role} worker {rank} had no connection during {self._sent.method!r}: {reply.error}"
        if self._sent.parts[i].num_retries:  # it was no passing weakness of the network's
            self._group.tell_lost(self._sent.parts[i], WorkerLostError(lost, self._group.role, rank))
        self._again(i, lost, reply.error)

    def _look_for_lost_peers(self, i: int) -> None:
        """Whoever works together with a worker that died fails as well, in words of its own, and sooner than Ray knows
        of the death. Raises WorkerLostError if that is why this one failed."""
        refs = {self._sent.parts[j].ref: j for j in self._open if j != i}
        waiting, until = list(refs), time.monotonic() + _PEERS_S
        while waiting and time.monotonic() < until and not self._group.ended.is_set():
            ready, waiting = self._ray.wait(waiting, timeout=_TICK)
            for ref in ready:
                try:
                    self._ray.get(ref)
                except self._ray.exceptions.RayError as error:
                    self._failed(refs[ref], error)

    def _failed(self, i: int, error: Exception) -> None:
        """Ray has no reply for us."""
        part, sent, exceptions = self._sent.parts[i], self._sent, self._ray.exceptions
        for before in sent.earlier:
            before.result()  # raises the error of an earlier call, whose result this one waits for
        if part.before != sent.earlier_refs():  # the earlier call was made again since
            self._group.dispatch(sent, i)
            return
        if not isinstance(error, (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.NodeDiedError)):
            text = " ".join(str(error).split())
            raise RunError(f"{sent.method!r} of {self._group.role} worker {part.rank} failed in Ray: {text}") from error
        self._lost(i, f"died during {sent.method!r}: {reason(error)}", error)

    def _lost(self, i: int, how: str, cause: Exception | None = None) -> None:
        part, process = self._sent.parts[i], self._sent.parts[i].process
        place = f" (process {process.pid} on {process.address})" if process.pid else ""
        log = f"; its log is {process.log}" if process.log else ""
        error = WorkerLostError(f"{self._group.role} worker {part.rank}{place} {how}{log}", self._group.role, part.rank)
        error.__cause__ = cause
        self._group.tell_lost(part, error)
        if not self._may_retry(i):
            raise error
        self._again(i, str(error), error)

    def _may_retry(self, i: int) -> bool:
        return not self._sent.is_last_try and self._group.may_replace(self._sent.parts[i].process)

    def _again(self, i: int, reason: str, cause: BaseException) -> None:
        """Put a part into the queue. Raises RunError when it was there too often."""
        part, retry = self._sent.parts[i], self._group.spec.retry
        if part.num_retries >= retry.limit:
            raise RunError(f"{reason} (given up after {part.num_retries} retries: recovery.max_retries)") from cause
        part.num_retries += 1
        delay = retry.delay(part.num_retries)
        logger.warning(
            "%s; its part of the call is made again in %.1f s (retry %d of %d)",
            *(reason, delay, part.num_retries, retry.limit),
        )
        self._group.tell_retry()
        self._open.discard(i)
        heapq.heappush(self._due, (time.monotonic() + delay, i))

    def _send_due(self) -> None:
        """Send the parts again whose time has come, to workers that were started again."""
        due: list[int] = []
        while self._due and self._due[0][0] <= time.monotonic():
            due.append(heapq.heappop(self._due)[1])
        if not due:
            return
        try:
            self._group.revive([self._sent.parts[i].process for i in due])
        except WorkerLostError as error:
            if error.role != self._group.role:
                raise
            for i in due:
                self._again(i, str(error), error)
            return
        for i in due:
            self._group.dispatch(self._sent, i)
            self._open.add(i)

    def _end_hung(self) -> None:
        """End the workers that have had a part for too long."""
        limit = self._sent.limit_s
        if not limit:
            return
        for i in sorted(self._open):
            part = self._sent.parts[i]
            waited = time.monotonic() - part.sent_at
            if waited > limit:
                self._group.end_hung(part.process)
                self._lost(
                    i,
                    f"hung: {self._sent.method!r} had not ended after {waited:.1f} s "
                    f"(roles.{self._group.role}.call_timeout_s), and was ended",
                )

    def _say_what_is_awaited(self) -> None:
        waited = time.monotonic() - self._began
        if self._open and waited > self._patience:
            names = ", ".join(self._sent.parts[i].process.label for i in sorted(self._open))
            logger.warning("waiting for %r of %s since %.0f s", self._sent.method, names, waited)
            self._patience *= 2


def reason(error: Exception) -> str:
    """Why Ray says that a process ended, without the advice around it."""
    text = " ".join(str(error).split())
    _, _, detail = text.rpartition("Worker exit detail: ")
    detail = detail.partition(" Some common causes include")[0].rstrip(".")
    if detail.endswith("End of file"):  # all that shows of a process that had no time to say anything
        return "it was killed (by somebody, or by the system for want of memory) or it crashed"
    return detail
