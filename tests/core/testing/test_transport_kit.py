"""Every check of the transport kit can fail; the toy that passes them moves bytes through files."""

import importlib
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollstock import Transport
from rollstock.interfaces.transport import Buffer
from rollstock.testing import ConformanceError, check_transport

PACKAGE = Path(__file__).parents[2] / "packages" / "spool"
sys.path.insert(0, str(PACKAGE))  # as if installed, so that another process can import it too
spool_transport = importlib.import_module("spool_transport")
sys.path.remove(str(PACKAGE))
Spool: Any = spool_transport.Spool


class JoinsBuffers(Spool):
    def encode(self, buffers: Sequence[Buffer]) -> bytes:
        return super().encode([b"".join(bytes(buffer) for buffer in buffers)])


class GivesBytes(Spool):
    def receive(self, name: str, *, timeout: float | None = None) -> list[memoryview]:
        return [bytes(buffer) for buffer in super().receive(name, timeout=timeout)]  # type: ignore[misc]  # the mistake


class NewestFirst(Spool):
    numbers = itertools.count(10**6, -1)

    def send(self, address: str, buffers: Sequence[Buffer], *, timeout: float | None = None) -> None:
        half = Path(address, ".half")
        half.write_bytes(self.encode(buffers))
        half.rename(Path(address, f"{next(self.numbers):010d}"))


class CutsLongOnes(Spool):
    def encode(self, buffers: Sequence[Buffer]) -> bytes:
        return super().encode([bytes(buffer)[:65536] for buffer in buffers])


class OneInbox(Spool):
    def bind(self, name: str) -> str:
        first = next(iter(self.folders.values()), None)
        self.folders[name] = first or tempfile.TemporaryDirectory()
        return self.folders[name].name


class NothingIsAMessage(Spool):
    def receive(self, name: str, *, timeout: float | None = None) -> list[memoryview]:
        try:
            return super().receive(name, timeout=timeout)
        except TimeoutError:
            return []


class ListensEverywhere(Spool):
    def bind(self, name: str) -> str:
        return f"tcp://0.0.0.0{super().bind(name)}"

    def send(self, address: str, buffers: Sequence[Buffer], *, timeout: float | None = None) -> None:
        super().send(address.removeprefix("tcp://0.0.0.0"), buffers, timeout=timeout)


class ClosesOnce(Spool):
    closed = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        super().close()


class TellsTheFirstAlone(Spool):
    def broadcast(
        self, addresses: Sequence[str], buffers: Sequence[Buffer], *, timeout: float | None = None
    ) -> Mapping[str, OSError]:
        first, *others = addresses
        failed = super().broadcast([first], buffers, timeout=timeout)
        return {**failed, **super().broadcast(others, [b""], timeout=timeout)}


class HidesTheGone(Spool):
    def broadcast(
        self, addresses: Sequence[str], buffers: Sequence[Buffer], *, timeout: float | None = None
    ) -> Mapping[str, OSError]:
        super().broadcast(addresses, buffers, timeout=timeout)
        return {}


class UsesItsMemoryAgain(Spool):
    memory = bytearray(64 << 20)

    def receive(self, name: str, *, timeout: float | None = None) -> list[memoryview]:
        found = super().receive(name, timeout=timeout)
        place = 0
        for index, buffer in enumerate(found):
            self.memory[place : place + len(buffer)] = buffer
            found[index] = memoryview(self.memory)[place : place + len(buffer)]
            place += len(buffer)
        return found


class CountsMessages(Spool):
    def statistics(self) -> dict[str, Any]:
        return {"bytes_sent": 1}


WRONG: list[tuple[type[Transport[Any]], str, str]] = [
    (JoinsBuffers, "messages", "the length of each"),
    (GivesBytes, "messages", "memoryview"),
    (NewestFirst, "order", "first in, first out"),
    (CutsLongOnes, "large", "8 MiB"),
    (TellsTheFirstAlone, "broadcast", "arrives at 'right'"),
    (HidesTheGone, "broadcast", "raises"),
    (UsesItsMemoryAgain, "ownership", "changed while its receiver kept it"),
    (OneInbox, "endpoints", "one address"),
    (NothingIsAMessage, "timeout", "TimeoutError"),
    (spool_transport.OnlyInThisProcess, "processes", "another process"),
    (ClosesOnce, "closing", "AssertionError"),
    (ListensEverywhere, "privacy", "for everyone"),
    (CountsMessages, "statistics", "every buffer"),
]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PACKAGE)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstock.testing.transport.ANSWER_S", 2.0)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(("wrong", "check", "said"), WRONG, ids=[wrong.__name__ for wrong, _, _ in WRONG])
def test_a_wrong_transport_is_caught_by_its_check(wrong: type[Transport[Any]], check: str, said: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_transport(wrong)
    assert caught.value.check == check
    assert said in str(caught.value)


def test_a_right_transport_passes() -> None:
    assert check_transport(Spool).skipped == {}


def test_a_class_that_another_process_cannot_import_is_not_tried_there() -> None:
    class Private(Spool):
        pass

    assert "cannot be sent" in check_transport(Private).skipped["processes"]
