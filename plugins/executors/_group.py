"""The controller's side of the workers of one role in Ray: how calls are split, sent and gathered.

For the `ray` executor, which starts the processes. The wait for a call is `_calls`, what runs in the processes `_host`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, Any

from rollstock import Metric, RunError, WorkerGroup, WorkerLoad, WorkerLostError, WorkerSpec
from rollstock.dispatch import Registration, Shares, gather, registration, split_call
from rollstock.plugins.executors._calls import Part, Sent, Waiting
from rollstock.plugins.executors._host import Pending
from rollstock.plugins.executors._parcel import Parcel
from rollstock.plugins.executors._process import Process

if TYPE_CHECKING:
    from rollstock.plugins.executors._revival import Revival

INLINE_BYTES = 64 << 10
"""What is smaller travels with the call itself; what is larger is put into the object store once for all."""


class RayGroup(WorkerGroup):
    """The workers of a role, one in each process."""

    def __init__(
        self,
        spec: WorkerSpec,
        processes: Sequence[Process],
        ray: Any,
        threads: ThreadPoolExecutor,
        revival: Revival,
        *,
        ended: Event,
        patience: float,
    ) -> None:
        """ended: set when nobody waits any more; patience: seconds after which a wait is logged. The workers are there
        after `build` and `finish`."""
        self.role = spec.role
        self.spec = spec
        self.processes = list(processes)
        self.ray = ray
        self.ended = ended
        self.patience = patience
        self._threads = threads
        self._revival = revival
        self._worker_class: type = object
        self._ranks: list[int] = list(range(len(processes)))
        self._meeting: dict[str, str] = {}
        self._building: Sent | None = None
        self._left: Future[Any] | None = None
        self.change_size: Callable[[RayGroup, int], int] | None = None
        self._meter = _Meter(self)

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.processes)

    def build(self, ranks: Sequence[int] | None = None) -> None:
        """Ask the processes of some ranks, by default of all, to build their workers."""
        count = self.spec.count
        chosen = list(range(self.size)) if ranks is None else list(ranks)
        if count > 1 and (not self._meeting or len(chosen) >= count):
            address, port = self.ray.get(self.processes[0].actor.meeting_point.remote())
            self._meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        parcel = Parcel.pack((self.spec.factory, dict(self.spec.kwargs), self.spec.count))
        parts = []
        for rank in chosen:
            process = self.processes[rank]
            has_peers = bool(self._meeting) and rank < count  # one that joined later has none
            own = {**self._meeting, "WORLD_SIZE": str(count), "RANK": str(rank)} if has_peers else {}
            ref = process.actor.build.remote(self.role, rank, parcel, own)
            parts.append(Part(rank, process, ref, process.generation, time.monotonic()))
        shares = Shares(Registration("all_gather", sync=True), (), len(parts), None, list(range(len(parts))))
        self._building = Sent("start", shares, None, parts, is_last_try=True)

    def finish(self) -> None:
        """Wait until the workers that were asked for are built. Raises what a factory raised."""
        building, self._building = self._building, None
        assert building is not None
        for part, reply in zip(building.parts, Waiting(self, building).replies(), strict=True):
            self._worker_class, data_parallel_rank, where = reply.value
            self._ranks[part.rank] = data_parallel_rank
            part.process.pid, part.process.address, part.process.node = where

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `WorkerGroup.call`. The caller may be interrupted while it waits; the workers finish what they do."""
        return self.ask(None, method, args, kwargs)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `WorkerGroup.submit`."""
        return self.send(None, method, args, kwargs)

    def member(self, rank: int) -> WorkerGroup:
        """See `WorkerGroup.member`."""
        return Member(self, rank)

    def ask(self, only: int | None, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Send a call, to all workers or to `only` one, and wait for it, unless its marker says that nobody does."""
        if method == "close" and (any(process.is_lost for process in self.processes) or self._is_busy()):
            return None  # there is nobody to tell, or a call that was broken off is to end first: `shutdown` does it
        sent = self.send(only, method, args, kwargs)
        if not sent.shares.marker.sync:
            return sent
        try:
            return sent.result()
        except WorkerLostError:
            if method == "close":
                return None  # it has ended already
            raise
        finally:
            if not sent.done():
                self._left = sent

    def _is_busy(self) -> bool:
        return self._left is not None and not self._left.done()

    def send(self, only: int | None, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sent:
        """Call every worker that takes part; each process answers its calls in the order in which they were sent."""
        marker = registration(self._worker_class, method, self.role)
        splits = marker.dispatch in ("scatter", "data_parallel")
        args, earlier = self._resolve(args, splits)
        ranks = list(range(self.size)) if only is None else [only]
        shares = split_call(marker, [self._ranks[rank] for rank in ranks], args)
        parcel = Parcel.pack((args, kwargs))
        payload = self.ray.put(parcel) if parcel.num_bytes > INLINE_BYTES else parcel
        parts = [Part(rank, self.processes[rank]) for rank in ranks[: shares.num_ranks]]
        num_items = len(args[0]) if splits and args else 0
        limit = self.spec.call_timeout_s
        is_last_try = method == "close" or self._revival.is_mine()
        sent = Sent(method, shares, payload, parts, earlier, num_items, limit, is_last_try)
        for i, part in enumerate(parts):
            if is_last_try or not self._is_being_replaced(part.process):  # such a one has what it needs only afterwards
                self.dispatch(sent, i)
        self._meter.begin(sent)
        self._threads.submit(self._finish, sent)
        return sent

    def _is_being_replaced(self, process: Process) -> bool:
        return process.is_lost and self.spec.retry.limit > 0 and self.may_replace(process)

    def dispatch(self, sent: Sent, i: int) -> None:
        """Send one part of a call, or send it again, to what the process is now."""
        part, shares = sent.parts[i], sent.shares
        part.generation, part.sent_at, part.before = part.process.generation, time.monotonic(), sent.earlier_refs()
        part.ref = part.process.actor.call.remote(
            *(self.role, part.rank, i, sent.method, i in shares.answering, shares.part(i), sent.payload, *part.before)
        )

    def _resolve(self, args: tuple[Any, ...], splits: bool) -> tuple[tuple[Any, ...], list[Sent]]:
        """The arguments with a place for each result of an earlier call, which its workers send to ours directly. What
        is to be split must be looked at here first."""
        earlier: list[Sent] = []
        found: list[Any] = []
        for number, arg in enumerate(args):
            if isinstance(arg, Sent) and not (splits and number == 0) and None not in arg.refs:
                start = sum(len(sent.parts) for sent in earlier)
                earlier.append(arg)
                found.append(Pending(start, start + len(arg.parts), _without_arguments(arg.shares)))
            else:
                found.append(arg.result() if isinstance(arg, Future) else arg)
        return tuple(found), earlier

    def _finish(self, sent: Sent) -> None:
        """Wait for the replies of a call and complete its future."""
        try:
            values = [reply.result for reply in Waiting(self, sent).replies()]
            result = gather(values, sent.shares)
        except BaseException as error:  # whatever it is belongs to whoever waits
            self._meter.end(sent)
            sent.set_exception(error)
        else:
            self._meter.end(sent)
            sent.set_result(result)

    def may_replace(self, process: Process) -> bool:
        """Whether a lost process can be started again while the run goes on."""
        return self._revival.may_replace(process)

    def tell_lost(self, part: Part, error: WorkerLostError) -> None:
        """A worker is lost, if it is still the one that had this part of a call."""
        self._revival.tell_lost(part.process, part.generation, error)

    def tell_retry(self) -> None:
        """A part of a call is made again."""
        self._revival.count({"recovery/num_retries": Metric(1.0, 1.0, "sum")})

    def revive(self, processes: Sequence[Process]) -> None:
        """Start those again that are lost."""
        self._revival.revive(processes)

    def end_hung(self, process: Process) -> None:
        """End a process that does not answer."""
        process.end_hung(self.ray)

    def count_work(self, seconds: float) -> None:
        """A worker spent so many seconds on its part of a call."""
        self._meter.busy_s += seconds

    @property
    def can_resize(self) -> bool:
        """See `WorkerGroup.can_resize`: for workers without a state that have processes of their own choice."""
        return self.change_size is not None and self._revival.is_alone(self)

    def resize(self, count: int) -> int:
        """See `WorkerGroup.resize`."""
        if self.change_size is None or not self.can_resize:
            raise RunError(f"the number of workers of {self.role} cannot be changed")
        return self.change_size(self, count)

    def add(self, process: Process) -> None:
        """Take one more process; its worker is there after `build` and `finish`."""
        self._ranks.append(self.size)
        self.processes.append(process)

    def remove(self) -> Process:
        """Give up the last process."""
        self._ranks.pop()
        return self.processes.pop()

    def load(self) -> WorkerLoad:
        """See `WorkerGroup.load`."""
        return self._meter.read()


class Member(WorkerGroup):
    """One worker of a group, as a group."""

    def __init__(self, group: RayGroup, rank: int) -> None:
        self.role = group.role
        self._group, self._rank = group, rank

    @property
    def size(self) -> int:
        """One."""
        return 1

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `WorkerGroup.call`."""
        return self._group.ask(self._rank, method, args, kwargs)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `WorkerGroup.submit`."""
        return self._group.send(self._rank, method, args, kwargs)


class _Meter:
    """Measures how busy a group is: seconds of work, and the most items that were waited for at once."""

    def __init__(self, group: RayGroup) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._items = self._most = 0
        self.busy_s = 0.0

    def begin(self, sent: Sent) -> None:
        """A call was sent."""
        with self._lock:
            self._items += sent.num_items
            self._most = max(self._most, self._items)

    def end(self, sent: Sent) -> None:
        """A call has ended."""
        with self._lock:
            self._items -= sent.num_items

    def read(self) -> WorkerLoad:
        """The load since this was last asked."""
        group = self._group
        with self._lock:
            now = time.monotonic()
            share = self.busy_s / max(1e-9, (now - self._since) * group.size)
            load = WorkerLoad(
                role=group.role,
                num_workers=group.size,
                queue_length=self._most,
                utilisation=min(1.0, share),
                num_configured=group.spec.count,
            )
            self._since, self._most, self.busy_s = now, self._items, 0.0
        return load


def _without_arguments(shares: Shares) -> Shares:
    """What `gather` needs of a call, without what it was called with."""
    return Shares(shares.marker, (), shares.num_ranks, shares.indices, shares.answering)
