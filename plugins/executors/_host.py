"""What runs in a Ray actor: the workers of one process, one for each role that lives there.

The controller's side is `_group`. Nothing here imports torch before a worker is built, so that the environment that it
reads can be set first.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollstock.plugins.executors._parcel import Columns, Parcel

Record = tuple[str, int, str]
"""The logger's name, the level and the text of a message."""


@dataclass
class Reply:
    """What a call came to: a value or an error, what the controller shall log, and how long it took."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0
    records: list[Record] = field(default_factory=list)

    @property
    def result(self) -> Any:
        """The value, as the worker returned it."""
        return self.value.lists() if isinstance(self.value, Columns) else self.value


@dataclass(frozen=True)
class Pending:
    """In the place of an argument: the results of an earlier call, replies number `start` to `stop` of those that Ray
    hands over with this one, gathered as `shares` says."""

    start: int
    stop: int
    shares: Any


@dataclass(frozen=True)
class Surroundings:
    """What of the controller's process its workers find again: variables, import path, working directory."""

    variables: Mapping[str, str]
    path: Sequence[str]
    directory: str

    def enter(self) -> None:
        """Make this process like it, as far as this machine allows."""
        os.environ.update(self.variables)
        sys.path.extend(entry for entry in self.path if entry not in sys.path)
        if Path(self.directory).is_dir():
            os.chdir(self.directory)


class _Recorder(logging.Handler):
    """Keeps messages: for the controller, and until there is a file for them."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def take(self) -> list[logging.LogRecord]:
        """What was kept; it begins anew."""
        taken, self.records = self.records, []
        return taken


class Host:
    """The actor."""

    def __init__(self, label: str, surroundings: Surroundings) -> None:
        surroundings.enter()
        self._label = label
        self._workers: dict[str, Any] = {}
        self._warnings = _Recorder(logging.WARNING)
        self._early = _Recorder(logging.INFO)
        log = logging.getLogger("rollstock")
        log.setLevel(logging.INFO)
        log.propagate = False
        log.addHandler(self._warnings)
        log.addHandler(self._early)

    def __repr__(self) -> str:
        """What Ray's own tools call this process."""
        return self._label

    def where(self) -> tuple[int, str, str]:
        """The process id, the machine's address, and the id of Ray's node there."""
        ray: Any = importlib.import_module("ray")
        return os.getpid(), str(ray.util.get_node_ip_address()), str(ray.get_runtime_context().get_node_id())

    def meeting_point(self) -> tuple[str, int]:
        """This machine's address, and a port of it on which nobody listens."""
        address = self.where()[1]
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, int(probe.getsockname()[1])

    def build(self, role: str, rank: int, parcel: Parcel, variables: Mapping[str, str]) -> Parcel:
        """Build the worker of a role; the reply's value is its class, its data-parallel rank, and `where` it is."""
        os.environ.update(variables)
        try:
            factory, kwargs, world_size = parcel.unpack()
            worker = factory(**kwargs, rank=rank, world_size=world_size)
            from rollstock.dispatch import data_parallel_rank

            self._workers[role] = worker
            return self._packed(Reply((type(worker), data_parallel_rank(worker, rank), self.where())))
        except (Exception, SystemExit) as error:  # whatever a plugin raises
            return self._failed(error, f"while {role} worker {rank} was built")

    def call(
        self,
        role: str,
        rank: int,
        place: int,
        method: str,
        answers: bool,
        part: Sequence[int] | None,
        parcel: Parcel,
        *earlier: Parcel,
    ) -> Parcel:
        """Call a worker with its part of the arguments in `parcel`, a pair of positional and keyword ones; `place`: of
        the worker among those that are called."""
        from rollstock.dispatch import registration, take, worth_sending

        began = time.monotonic()
        try:
            worker = self._workers[role]
            marker = registration(type(worker), method, role)
            args, kwargs = parcel.unpack()
            if earlier:
                args = self._fill_in(args, earlier)
            if marker.places and part is not None:
                kwargs = {**kwargs, "places": list(part)}
            result = getattr(worker, method)(*take(args, part), **kwargs)
            sent = worth_sending(marker, result, answers=answers, rank=place)
            value = Columns(sent) if Columns.fit(sent) else sent
            return self._packed(Reply(value, seconds=time.monotonic() - began))
        except (Exception, SystemExit) as error:  # whatever a plugin raises
            return self._failed(error, f"in {method!r} of {role} worker {rank}")

    def _fill_in(self, args: tuple[Any, ...], earlier: Sequence[Parcel]) -> tuple[Any, ...]:
        from rollstock.dispatch import gather

        replies: list[Reply] = [parcel.unpack() for parcel in earlier]
        for reply in replies:
            if reply.error is not None:
                raise reply.error
        return tuple(
            gather([reply.result for reply in replies[arg.start : arg.stop]], arg.shares)
            if isinstance(arg, Pending)
            else arg
            for arg in args
        )

    def open_log(self, path: str) -> None:
        """Log to a file from now on: messages, those until now included, and what the process prints."""
        from rollstock import log_to_file

        handler = log_to_file(Path(path))
        logging.getLogger("rollstock").removeHandler(self._early)
        for record in self._early.take():
            handler.handle(record)
        sys.stdout.flush()
        sys.stderr.flush()
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)

    def _failed(self, error: BaseException, note: str) -> Parcel:
        from rollstock import RunError

        trace = traceback.format_exc()
        logging.getLogger("rollstock.worker").error("%s:\n%s", note, trace)
        self._warnings.records.pop()  # the controller hears of it anyway
        if not isinstance(error, Exception):
            error = RunError(f"{note}: {type(error).__name__}({error}) would have ended the process")
        error.add_note(note)
        try:
            packed = self._packed(Reply(error=error, trace=trace))
            packed.unpack()
        except Exception:  # it cannot travel: not every exception can be made again from its arguments
            told = RunError(f"{type(error).__name__}: {error}")
            for text in getattr(error, "__notes__", ()):
                told.add_note(text)
            packed = self._packed(Reply(error=told, trace=trace))
        return packed

    def _packed(self, reply: Reply) -> Parcel:
        reply.records = [(record.name, record.levelno, record.getMessage()) for record in self._warnings.take()]
        return Parcel.pack(reply)
