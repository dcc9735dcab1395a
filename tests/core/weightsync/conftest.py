"""Both ends of a weight sync in one process, over a transport that may be made to do harm."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rollstock import LowRank, NoOptions, Transport
from rollstock.interfaces.transport import Buffer
from rollstock.manager import make_manager
from rollstock.weightsync.cargo import Cargo, named
from rollstock.weightsync.receiver import WeightReceiver
from rollstock.weightsync.sender import Offer, WeightSender

Harm = Callable[[str, list[bytes]], list[list[bytes]]]
"""What becomes of a message to an address: the messages that are sent in its place."""

CHUNK = 40_000
"""Bytes: more than the transport `shm` takes without a block."""


class Harmful(Transport[NoOptions]):
    """Another transport, whose messages something happens to on the way."""

    def __init__(self, inner: Transport[Any], harm: Harm) -> None:
        super().__init__()
        self.inner, self.harm = inner, harm

    def bind(self, name: str) -> str:
        return self.inner.bind(name)

    def send(self, address: str, buffers: Sequence[Buffer], *, timeout: float | None = None) -> None:
        for message in self.harm(address, [bytes(buffer) for buffer in buffers]):
            self.inner.send(address, message, timeout=timeout)

    def receive(self, name: str, *, timeout: float | None = None) -> list[memoryview]:
        return self.inner.receive(name, timeout=timeout)

    def close(self) -> None:
        self.inner.close()


class Ends:
    """A sender and receivers; `sync` brings a cargo over and gives what each receiver got, or raised."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sender: Any = None
        self.receivers: list[WeightReceiver] = []
        self.metrics: dict[str, float] = {}

    def transport(self, harm: Harm | None = None, **options: Any) -> Transport[Any]:
        inner: Transport[Any] = make_manager().create("transport", {"name": self.name, **options})
        return Harmful(inner, harm) if harm else inner

    def start(self, count: int = 1, *, harm: Harm | None = None, **limits: Any) -> None:
        self.sender = WeightSender(self.transport(harm), CHUNK)
        for rank in range(count):
            self.add(rank, **{"patience_s": 0.2 if harm else 10.0, **limits})

    def add(self, rank: int, **limits: Any) -> WeightReceiver:
        known = {"max_resends": 3, "timeout_s": 60.0, **limits}
        self.receivers.append(WeightReceiver(self.transport(), rank, **known))
        return self.receivers[-1]

    def offer(self, cargo: Cargo, version: int) -> Offer:
        offer: Offer = self.sender.offer(cargo, version, [receiver.address for receiver in self.receivers])
        return offer

    def sync(self, cargo: Cargo, version: int = 1) -> list[dict[str, torch.Tensor]]:
        offer = self.offer(cargo, version)
        with ThreadPoolExecutor(len(self.receivers)) as threads:
            found = list(threads.map(lambda receiver: taken(receiver, offer), self.receivers))
        self.metrics = {name: metric.value for name, metric in self.sender.finish().items()}
        return found

    def close(self) -> None:
        for end in (*self.receivers, *([self.sender] if self.sender else [])):
            end.close()


def taken(receiver: WeightReceiver, offer: Offer) -> dict[str, torch.Tensor]:
    """The weights of an offer, all kept: more than a transport lends at a time."""
    return dict(named(receiver.receive(offer)))


@pytest.fixture(params=["shm", "zmq"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    if request.param == "zmq":
        pytest.importorskip("zmq")
    made = Ends(request.param)
    yield made
    made.close()


@pytest.fixture
def cargo() -> Cargo:
    """Tensors of several types and sizes, some larger than a chunk, one of them empty, two of them one."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(500, 200, generator=generator)
    return Cargo(
        [
            ("embedding", large),
            ("norm", torch.randn(7, generator=generator)),
            ("half", torch.randn(33, 3, generator=generator).to(torch.bfloat16)),
            ("nothing", torch.zeros(0, 4)),
            ("turned", torch.randn(40, 60, generator=generator).t()),
            ("counts", torch.arange(3)),
            ("head", large),
            ("flag", torch.tensor(True)),
        ]
    )


@pytest.fixture
def adapters() -> list[tuple[str, LowRank]]:
    return [("turned", LowRank(torch.randn(2, 40), torch.randn(60, 2), 0.5))]
