"""Sandbox: worker processes that answer one call each at a time, under a limit that truly ends a call.

The parent's loop is a selector over the workers' sockets and outputs. It owns every decision: which worker gets what,
when a call has taken too long, what became of it.
"""

from __future__ import annotations

import logging
import os
import pickle
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from rollstock.errors import RunError, UserError
from rollstock.sandbox.failures import FailureLog, Label
from rollstock.sandbox.outcome import Outcome, read_answer
from rollstock.sandbox.process import WorkerProcess, describe_exit
from rollstock.sandbox.protocol import Answer, Ask, Build, Doing, Ready

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")

# How often a worker that says nothing is asked whether it still lives: a child of it may keep its socket open.
TICK_SECONDS = 0.2
MAX_FAILED_STARTS = 3


class Sandbox(Generic[RequestT, ResultT]):
    """Worker processes that serve what `factory` makes, started once and reused; a context manager.

    factory: called once in each worker; what it returns is called once per request. It, the requests and the results
    must be picklable by what the worker can import (a function at the top of a module, `functools.partial` of one
    with plain arguments); nothing may live in `__main__`. name: what the sandbox is called in messages. limit:
    seconds that one call may take; at its end the worker is killed with everything that it started, and replaced.
    start_limit: seconds that a worker may take to start. Several threads may call `map`; they take turns.
    """

    def __init__(
        self,
        factory: Callable[[], Callable[[RequestT], ResultT]],
        *,
        name: str,
        limit: float,
        num_workers: int = 1,
        start_limit: float = 120.0,
    ) -> None:
        if limit <= 0 or num_workers < 1:
            raise ValueError(
                f"a sandbox needs a positive limit and a worker, not limit={limit}, num_workers={num_workers}"
            )
        self.name = name
        self.limit = limit
        self.start_limit = start_limit
        self.num_workers = num_workers
        self.num_replaced = 0
        self._build = Build(_pickled_factory(factory, name))
        self._workers: list[WorkerProcess] = []
        self._failed_starts = 0
        self._failures = FailureLog(name)
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _end_all, self._workers, os.getpid())

    def start(self) -> None:
        """Start the workers and wait until each can serve, so that a factory that fails does so before the run begins.

        Raises UserError if the factory raised one, RunError if a worker failed to start otherwise.
        """
        with self._lock:
            _Round(self, [], [], []).run(wait_for_all=True)

    def map(
        self,
        requests: Sequence[RequestT],
        *,
        names: Sequence[str],
        of: Sequence[str] | None = None,
        when: str = "",
        seeds: Sequence[int | None] | None = None,
    ) -> list[Outcome[ResultT]]:
        """Make one call a request; the outcomes are in the order of the requests, whoever answered first.

        names: what to call each request in the log, where calls that raised or timed out are named, `of` what each is
        asked and `when`; failures that repeat one told before, in this call or an earlier one, are counted in a line
        at the end. seeds: of the global random generators during each call, so that a result depends neither on the
        worker nor on the calls before it. Raises what `start` raises; a call that goes wrong raises nothing here.
        """
        count = len(requests)
        asked, seeded = of or [""] * count, seeds or [None] * count
        if not count == len(names) == len(asked) == len(seeded):
            raise ValueError(
                f"{count} requests need as many names, subjects and seeds, not {len(names)}, {len(asked)} and "
                f"{len(seeded)}"
            )
        labels = [Label(subject, name, when) for subject, name in zip(asked, names, strict=True)]
        with self._lock:
            return _Round(self, requests, labels, seeded).run()

    def close(self) -> None:
        """End the workers and all that they started. The sandbox can be used again: its workers are started anew."""
        with self._lock:
            _end_all(self._workers, os.getpid())

    def __enter__(self) -> Sandbox[RequestT, ResultT]:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run now."""
        return [worker.pid for worker in self._workers]

    def _fill(self) -> list[WorkerProcess]:
        """Start the workers that are missing, without waiting for them; returns the new ones."""
        new = [WorkerProcess() for _ in range(self.num_workers - len(self._workers))]
        self._workers += new
        for worker in new:
            worker.send(self._build)
        return new

    def _started(self, worker: WorkerProcess, ready: Ready) -> None:
        """A worker reports. Raises the factory's error."""
        if ready.error:
            if ready.users_fault:
                error = UserError(ready.error)
                if worker.making:
                    error.add_note(f"while {worker.making} was made")
                raise error
            message = f"{self.name}: a worker process could not {_make(worker)}: {ready.error}"
            raise RunError(f"{message}\n{ready.traceback}{worker.output.take()}".rstrip())
        worker.ready = True
        worker.output.take()
        self._failed_starts = 0

    def _start_failed(self, worker: WorkerProcess, reason: str, *, left: bool = False) -> None:
        """A worker ended before it could serve. Raises RunError when that keeps happening, UserError at once if it
        `left` of its own accord while something was made that is known by name.
        """
        self._failed_starts += 1
        output = worker.output.take().strip()
        details = f":\n{output}" if output else ""
        if left and worker.making:
            raise UserError(
                f"{self.name}: {worker.making} ended its process ({reason}) while it was made; code that is imported "
                f"must not exit{details}"
            )
        message = f"{self.name}: a worker process did not start ({reason})"
        message += f" while {worker.making} was made" if worker.making else ""
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise RunError(message + details)
        logger.warning("%s; trying again%s", message, details if self._failed_starts == 1 else "")


class _Round(Generic[RequestT, ResultT]):
    """One pass over some requests: what waits, which worker has what, and what came of it."""

    def __init__(
        self,
        sandbox: Sandbox[RequestT, ResultT],
        requests: Sequence[RequestT],
        labels: Sequence[Label],
        seeds: Sequence[int | None],
    ) -> None:
        self.sandbox = sandbox
        self.requests, self.labels, self.seeds = requests, labels, seeds
        self.outcomes: dict[int, Outcome[ResultT]] = {}
        self.waiting = deque(range(len(requests)))
        self.doing: dict[WorkerProcess, int] = {}
        self.selector = selectors.DefaultSelector()
        self.next_look = 0.0

    def run(self, wait_for_all: bool = False) -> list[Outcome[ResultT]]:
        """Serve all requests; with `wait_for_all`, also wait until every worker is ready."""
        workers = self.sandbox._workers
        try:
            for worker in workers:
                self.watch(worker)
            self.fill()
            self.pump(0.0)  # replaces what died since the last round, before it is given anything
            while len(self.outcomes) < len(self.requests) or (wait_for_all and not all(w.ready for w in workers)):
                self.dispatch()
                self.pump(self.timeout())
                self.check_clocks()
        except BaseException:
            # What a busy worker is about to say belongs to this round; the next one gets a fresh worker.
            for worker in [w for w in workers if w in self.doing or not w.ready]:
                self.drop(worker)
            raise
        finally:
            self.selector.close()
            self.sandbox._failures.tell_repeats()
        return [self.outcomes[index] for index in range(len(self.requests))]

    def fill(self) -> None:
        """Start missing workers and listen to them."""
        for worker in self.sandbox._fill():
            self.watch(worker)

    def watch(self, worker: WorkerProcess) -> None:
        self.selector.register(worker.connection, selectors.EVENT_READ, worker)
        self.selector.register(worker.output_fd, selectors.EVENT_READ, worker)
        self.watch_sending(worker)

    def watch_sending(self, worker: WorkerProcess) -> None:
        """Listen for room in the socket while there is something left to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.sending else 0)
        self.selector.modify(worker.connection, events, worker)

    def dispatch(self) -> None:
        """Give each idle worker a request."""
        for worker in self.sandbox._workers:
            while self.waiting and worker.ready and worker not in self.doing:
                index = self.waiting.popleft()
                try:
                    request = pickle.dumps(self.requests[index], protocol=pickle.HIGHEST_PROTOCOL)
                except Exception as error:
                    self.settle(index, Outcome("raised", error=f"it cannot be sent to a worker: {error}"))
                    continue
                self.doing[worker] = index
                worker.drain_output()
                worker.output.take()  # printed between two calls: no sample's
                worker.deadline = time.monotonic() + self.sandbox.limit
                worker.send(Ask(index, request, self.seeds[index]))
                self.watch_sending(worker)

    def timeout(self) -> float:
        """Seconds until the next clock runs out, at most a tick."""
        now = time.monotonic()
        deadlines = [worker.deadline - now for worker in self.doing if worker.deadline is not None]
        return max(0.0, min([TICK_SECONDS, *deadlines]))

    def pump(self, timeout: float) -> None:
        """Take in what the workers say."""
        ended: list[WorkerProcess] = []
        for key, events in self.selector.select(timeout):
            worker = key.data
            if worker in ended:
                continue
            if key.fd == worker.output_fd:
                if not worker.drain_output():
                    self.selector.unregister(worker.output_fd)  # closed by the worker, and always readable from now on
                continue
            if events & selectors.EVENT_WRITE:
                worker.flush()
                self.watch_sending(worker)
            if events & selectors.EVENT_READ and not self.listen(worker):
                ended.append(worker)
        for worker in ended:
            self.died(worker)

    def listen(self, worker: WorkerProcess) -> bool:
        """Take in what one worker says; False if it has hung up."""
        data, more = worker.receive()
        for message in worker.reader.feed(data):
            worker.drain_output()
            if isinstance(message, Doing):
                worker.making = message.what
            elif isinstance(message, Ready):
                self.sandbox._started(worker, message)
            elif isinstance(message, Answer):
                worker.deadline = None
                self.settle(self.doing.pop(worker), read_answer(message, worker.output.take()))
        return more

    def check_clocks(self) -> None:
        """End the calls whose time is over, and notice workers that ended without a word."""
        now = time.monotonic()
        look = now >= self.next_look
        if look:
            self.next_look = now + TICK_SECONDS
        for worker in list(self.sandbox._workers):
            if worker.deadline is not None and now >= worker.deadline:
                self.timed_out(worker)
            elif look and worker.exit_code() is not None:
                self.listen(worker)  # its last answer may wait to be read
                self.died(worker)
            elif not worker.ready and now - worker.started > self.sandbox.start_limit:
                self.replace(worker)
                self.sandbox._start_failed(worker, f"not ready after {self.sandbox.start_limit:g} s")

    def timed_out(self, worker: WorkerProcess) -> None:
        index = self.doing.pop(worker)
        worker.drain_output()
        limit = self.sandbox.limit
        self.replace(worker)
        error = f"no answer within {limit:g} s; its process was ended"
        self.settle(index, Outcome("timed_out", error=error, output=worker.output.take(), seconds=limit))

    def died(self, worker: WorkerProcess) -> None:
        index = self.doing.pop(worker, None)
        worker.drain_output()
        began = (worker.deadline or 0.0) - self.sandbox.limit
        # A worker hangs up a moment before it has ended.
        code = worker.exit_code(wait=0.5)
        reason = describe_exit(code)
        self.replace(worker)
        if not worker.ready:
            self.sandbox._start_failed(worker, reason, left=code is not None and code >= 0)
        elif index is not None:
            error = f"its process died ({reason})"
            seconds = time.monotonic() - began
            self.settle(index, Outcome("raised", error=error, output=worker.output.take(), seconds=seconds))
        else:
            logger.warning("%s: an idle worker process died (%s) and was replaced", self.sandbox.name, reason)

    def replace(self, worker: WorkerProcess) -> None:
        """End a worker and start another."""
        self.drop(worker)
        self.sandbox.num_replaced += 1
        self.fill()

    def drop(self, worker: WorkerProcess) -> None:
        """End a worker and forget it."""
        for descriptor in (worker.connection, worker.output_fd):
            if descriptor in self.selector.get_map():
                self.selector.unregister(descriptor)
        self.sandbox._workers.remove(worker)
        worker.end()

    def settle(self, index: int, result: Outcome[ResultT]) -> None:
        """Record an outcome; one without a value is told in the log."""
        self.outcomes[index] = result
        if result.status != "ok":
            self.sandbox._failures.add(self.labels[index], result)


def _make(worker: WorkerProcess) -> str:
    return f"make {worker.making}" if worker.making else "be set up"


def _pickled_factory(factory: Callable[..., Any], name: str) -> bytes:
    try:
        return pickle.dumps(factory, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UserError(f"{name}: cannot be sent to a worker process: {error}") from error


def _end_all(workers: list[WorkerProcess], owner: int) -> None:
    """End the workers of a sandbox, unless this is a forked copy of the process that owns them."""
    while workers and os.getpid() == owner:
        workers.pop().end()
