"""A toy transport for tests: messages are files."""

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollstock import NoOptions, Transport, hookimpl
from rollstock.interfaces.transport import Buffer


class Spool(Transport[NoOptions]):
    """A right transport: each message a file, each endpoint a directory that is its address."""

    numbers = itertools.count()

    def __init__(self, config: NoOptions | None = None) -> None:
        super().__init__(config)
        self.folders: dict[str, tempfile.TemporaryDirectory[str]] = {}
        self.sent = 0

    def bind(self, name: str) -> str:
        self.folders[name] = tempfile.TemporaryDirectory()
        return self.folders[name].name

    def encode(self, buffers: Sequence[Buffer]) -> bytes:
        parts = [bytes(buffer) for buffer in buffers]
        return b"".join([len(parts).to_bytes(8), *(len(part).to_bytes(8) for part in parts), *parts])

    def decode(self, data: bytes) -> list[memoryview]:
        count = int.from_bytes(data[:8])
        lengths = [int.from_bytes(data[8 * i : 8 * i + 8]) for i in range(1, count + 1)]
        ends = list(itertools.accumulate(lengths, initial=8 * (count + 1)))
        return [memoryview(data)[start:end] for start, end in itertools.pairwise(ends)]

    def send(self, address: str, buffers: Sequence[Buffer], *, timeout: float | None = None) -> None:
        name = f"{time.monotonic_ns():020d}-{next(self.numbers):010d}"
        half = Path(address, f".{name}-{os.getpid()}")
        half.write_bytes(self.encode(buffers))
        half.rename(Path(address, name))
        self.sent += sum(len(buffer) for buffer in buffers)

    def receive(self, name: str, *, timeout: float | None = None) -> list[memoryview]:
        end = time.monotonic() + (timeout or 1e9)
        while True:
            found = sorted(path for path in Path(self.folders[name].name).iterdir() if path.name[0] != ".")
            if found:
                data = found[0].read_bytes()
                found[0].unlink()
                return self.decode(data)
            if time.monotonic() > end:
                raise TimeoutError(f"nothing came to {name!r} in {timeout} s")
            time.sleep(0.005)

    def close(self) -> None:
        for folder in self.folders.values():
            with contextlib.suppress(OSError):
                folder.cleanup()
        self.folders.clear()

    def statistics(self) -> dict[str, Any]:
        return {"bytes_sent": self.sent}


class OnlyInThisProcess(Spool):
    def bind(self, name: str) -> str:
        return f"{os.getpid()}:{super().bind(name)}"

    def send(self, address: str, buffers: Sequence[Buffer], *, timeout: float | None = None) -> None:
        process, _, folder = address.partition(":")
        if int(process) == os.getpid():
            super().send(folder, buffers, timeout=timeout)


@hookimpl
def rollstock_transport() -> type[Transport[Any]]:
    """The class of this plugin."""
    return Spool
