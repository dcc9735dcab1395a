"""Transports as a run makes them, in this process and in another that can be killed."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollstock import Transport
from rollstock.manager import make_manager

OTHER = """
import sys, time
from rollstock.manager import make_manager
transport = make_manager().create("transport", {"name": sys.argv[1]})
print(transport.bind("inbox"), flush=True)
for line in sys.stdin:
    what, *rest = line.split()
    if what == "take":
        kept = transport.receive("inbox", timeout=60)
        print(sum(map(len, kept)), flush=True)
    else:
        transport.send(rest[0], [bytes([7]) * int(rest[1])], timeout=60)
        print("sent", flush=True)
"""


class Process:
    """Another process with an endpoint. `take` receives and keeps a message there; `send` sends one from there."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-c", OTHER, name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        assert answer, "the other process ended"
        return answer

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def take(self) -> int:
        return int(self._ask("take"))

    def send(self, address: str, size: int) -> None:
        assert self._ask(f"send {address} {size}") == "sent"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def other() -> Iterator[Callable[[str], Process]]:
    made: list[Process] = []

    def make(name: str) -> Process:
        made.append(Process(name))
        return made[-1]

    yield make
    for process in made:
        process.kill()


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    made: list[Transport[Any]] = []

    def make(name: str, **options: Any) -> Transport[Any]:
        made.append(make_manager().create("transport", {"name": name, **options}))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@contextmanager
def new_sockets() -> Iterator[set[tuple[str, str]]]:
    """The TCP and UDP sockets (IPv4 and IPv6) that this process has opened by the end of the block, each as the
    kernel's table and the local address in it, as it writes that."""
    before, found = _inodes(), set[tuple[str, str]]()
    yield found
    ours = _inodes() - before
    for table in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        found |= {(table, line.split()[1].partition(":")[0]) for line in lines if line.split()[9] in ours}


def _inodes() -> set[str]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target.removeprefix("socket:[").rstrip("]"))
    return found
