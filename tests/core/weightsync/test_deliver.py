"""A generator that is started while the trainer is further on gets the weights that its version number stands for."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollstock import LowRank, Metric, WorkerGroup
from rollstock.weightsync.cargo import Cargo
from rollstock.weightsync.deliver import give_weights, sync_weights


class Actor(WorkerGroup):
    """Its weights are all of one number, and so is the state of its router."""

    role = "actor"
    size = 1
    number = 0.0

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "weights":
            return self.cargo(*args)
        if method == "offer_weights":
            version, _inboxes, *rest = args
            return self.cargo(*rest), version
        return {
            "fingerprint": str(self.number),
            "router_state": {"number": self.number},
            "base_fingerprint": "base",
            "finish_offer": {"sync/bytes": Metric(16.0, 1.0, "sum")},
        }[method]

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self.call(method, *args, **kwargs))
        return future

    def cargo(self, adapters: bool, base: bool) -> Cargo:
        whole = torch.full((2, 2), self.number)
        if not adapters:
            return Cargo([("w", whole)])
        return Cargo([("w", torch.zeros(2, 2))] if base else [], [("w", LowRank(torch.eye(2), whole, 1.0))])


class Generator(WorkerGroup):
    """One worker, and the numbers of what it has: of its weights, of their version and of its router."""

    role = "rollout"
    size = 1

    def __init__(self) -> None:
        self.base: torch.Tensor | None = None
        self.weights = self.version = self.router = 0.0

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "load_weights":
            cargo, version, _alias = args
            return self.load(cargo.result() if isinstance(cargo, Future) else cargo, version)
        if method == "take_weights":
            return self.load(*args[0])
        if method == "load_router":
            self.router = args[0]["number"]
        known = "" if self.base is None else "base"
        return {"fingerprint": [str(self.weights)], "base_fingerprint": [known], "weights_inbox": [""]}.get(method)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        raise AssertionError("nobody needs it")

    def load(self, cargo: Cargo, version: int) -> dict[str, Metric]:
        if cargo.weights:
            self.base = cargo.weights[0][1]
        assert self.base is not None, "adapters came without what they are added to"
        whole = cargo.adapters[0][1].merge(self.base) if cargo.adapters else self.base
        self.weights, self.version = float(whole[0, 0]), version
        return {"sync/bytes": Metric(16.0, 1.0, "max")}

    @property
    def numbers(self) -> tuple[float, float, float]:
        return self.weights, self.version, self.router


def run_of(content: str = "full", transport: str | None = None, *, ahead: bool = True) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(
            weight_sync=SimpleNamespace(content=content, max_resends=0), transport=transport, router={"name": "vote"}
        ),
        roles={"actor": Actor(), "rollout": Generator()},
        pipeline=SimpleNamespace(runs_ahead=ahead),
        executor=SimpleNamespace(recovers=True, shares_memory=False),
        version=0,
        fingerprint="",
        delivered=None,
        record=lambda metrics: None,
    )


def given(run: Any) -> tuple[float, float, float]:
    """What a new generator is given now."""
    worker = Generator()
    give_weights(run, worker)
    return worker.numbers


@pytest.mark.parametrize("transport", [None, "shm"])
@pytest.mark.parametrize("content", ["full", "adapters"])
def test_a_generator_that_is_started_during_an_update_gets_the_version_before_it(
    content: str, transport: str | None
) -> None:
    run = run_of(content, transport)
    for version in (1, 2, 3):
        run.roles["actor"].number = 10.0 * version  # an update
        sync_weights(run)
        assert run.roles["rollout"].numbers == given(run) == (10.0 * version, version, 10.0 * version)
        run.roles["actor"].number += 1.0  # the next one has begun
        assert given(run) == (10.0 * version, version, 10.0 * version)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_generator_that_is_started_within_a_sync_gets_the_version_that_it_brings(ahead: bool) -> None:
    run, found = run_of(ahead=ahead), []
    rollout, call = run.roles["rollout"], run.roles["rollout"].call

    def replaced(method: str, *args: Any) -> Any:
        if method == "fingerprint":
            found.append(given(run))
        return call(method, *args)

    rollout.call = replaced
    for number in (10.0, 20.0):
        run.roles["actor"].number = number
        sync_weights(run)
    assert [numbers[:2] for numbers in found] == [(10.0, 1), (20.0, 2)]


def test_no_copy_of_the_weights_is_kept_where_nobody_generates_during_an_update() -> None:
    run = run_of(ahead=False)
    sync_weights(run)
    assert run.delivered is None
