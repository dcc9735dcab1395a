"""The worker's side of a sandbox: builds what it serves, then answers calls until its parent is gone.

Started by `rollstock.sandbox.process` and by nobody else. It imports neither torch nor a plugin by itself; what the
factory imports is the factory's affair.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from rollstock.sandbox.protocol import MAX_ANSWER_BYTES, Answer, Ask, Build, Doing, FrameReader, Ready, frame

PR_SET_CHILD_SUBREAPER = 36
RECEIVE_BYTES = 1 << 16
_parent: socket.socket | None = None


def main() -> None:
    """Run a worker: `argv` holds the descriptors of the socket to the parent and of the pipe that closes with it."""
    connection_fd, lifeline = (int(argument) for argument in sys.argv[1:3])
    for descriptor in (connection_fd, lifeline):
        os.set_inheritable(descriptor, False)
    die_with_parent(lifeline)
    leave_signals_to_parent()
    adopt_orphans()
    faulthandler.enable()
    serve(socket.socket(fileno=connection_fd))


def serve(connection: socket.socket) -> None:
    """Answer the calls that arrive on `connection` until it closes."""
    global _parent
    _parent = connection
    try:
        _answer_all(connection)
    finally:
        _parent = None


def _answer_all(connection: socket.socket) -> None:
    reader = FrameReader()
    handler: Callable[[Any], Any] | None = None
    while piece := connection.recv(RECEIVE_BYTES):
        for message in reader.feed(piece):
            match message:
                case Build(factory):
                    handler, ready = build(factory)
                    connection.sendall(frame(ready))
                case Ask() if handler is not None:
                    answer = call(handler, message)
                    flush_output()
                    connection.sendall(frame(answer))
                case _:
                    raise AssertionError(f"a worker was sent {message!r}")


def announce(what: str) -> None:
    """For a factory: tell the parent what is made next. Somebody else's code may end this process while it is
    imported, and then only the parent can say whose it was. Does nothing in any other process.
    """
    if _parent is not None:
        _parent.sendall(frame(Doing(what)))


def build(factory: bytes) -> tuple[Callable[[Any], Any] | None, Ready]:
    """Make what the worker serves; an exception becomes the parent's to report."""
    try:
        handler = pickle.loads(factory)()
    except BaseException as error:
        users_fault = is_users_fault(error)
        text = str(error) if users_fault else describe(error)
        return None, Ready(text, traceback.format_exc(), users_fault=users_fault)
    return handler, Ready()


def call(handler: Callable[[Any], Any], ask: Ask) -> Answer:
    """Make one call. Whatever it raises, `SystemExit` and `KeyboardInterrupt` included, is its answer."""
    if ask.seed is not None:
        seed_generators(ask.seed)
    started = time.perf_counter()
    try:
        result = handler(pickle.loads(ask.request))
        seconds = time.perf_counter() - started
        value = pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
        if len(value) > MAX_ANSWER_BYTES:
            raise ValueError(f"the result takes {len(value)} bytes; at most {MAX_ANSWER_BYTES} can be handed back")
    except BaseException as error:
        seconds = time.perf_counter() - started
        return Answer(ask.number, error=describe(error), traceback=traceback.format_exc(), seconds=seconds)
    return Answer(ask.number, value=value, seconds=seconds)


def describe(error: BaseException) -> str:
    """An exception in one line, even if its own `__str__` raises."""
    try:
        text = str(error)
    except Exception:
        text = ""
    lines = text.strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_users_fault(error: BaseException) -> bool:
    """Whether the exception means that the user's input is wrong."""
    from rollstock.errors import UserError

    return isinstance(error, UserError)


def seed_generators(seed: int) -> None:
    """Seed every global generator that the served code may draw from; packages that it has not imported are left
    alone."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def flush_output() -> None:
    """Hand over what was printed before the answer is, so that the parent finds it with the right sample."""
    for stream in (sys.stdout, sys.stderr):
        # The served code may have closed or replaced the stream.
        with contextlib.suppress(Exception):
            stream.flush()


def die_with_parent(lifeline: int) -> None:
    """See to it that this process group ends as soon as the other end of the pipe `lifeline` closes.

    The kernel sends the signal, where it can: code that holds the interpreter's lock for ever (a regular expression
    that backtracks) would keep a watching thread from running. The thread is for systems without `F_SETSIG`, and
    notices a changed parent where a forked child of the parent still holds the pipe. `PR_SET_PDEATHSIG` was rejected:
    it fires when the thread that started the worker ends.
    """
    parent = os.getppid()
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        while os.getppid() == parent and not select.select([lifeline], [], [], 1.0)[0]:
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="rollstock-lifeline", daemon=True).start()


def leave_signals_to_parent() -> None:
    """Do nothing on SIGINT and SIGTERM: the parent decides whether a step is finished.

    Handlers that do nothing, not SIG_IGN: programs that the served code starts get the default back, and so do forked
    children.
    """

    def nothing(_number: int, _frame: object) -> None:
        return None

    def restore() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, nothing)
    os.register_at_fork(after_in_child=restore)


def adopt_orphans() -> None:
    """On Linux, stay the ancestor of every process started from here, so that all of them can be found and ended."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
