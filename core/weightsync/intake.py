"""A generator's weights as the worker takes them: whole, or as adapters that it adds to what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollstock.errors import RunError
from rollstock.interfaces.rollout import Rollout
from rollstock.metrics import Metric, Metrics
from rollstock.weights import fingerprint
from rollstock.weightsync.cargo import Cargo, named, unpacked
from rollstock.weightsync.receiver import WeightReceiver
from rollstock.weightsync.sender import Offer


class WeightIntake:
    """What one engine is given. receiver: None where the executor carries the weights."""

    def __init__(self, engine: Rollout[Any], receiver: WeightReceiver | None) -> None:
        self._engine = engine
        self._receiver = receiver
        self._base: dict[str, Tensor] = {}
        self.base_fingerprint = ""
        """Of the weights that adapters are added to; empty if there are none."""

    @property
    def address(self) -> str:
        """Where a transport sends to."""
        return "" if self._receiver is None else self._receiver.address

    def take(self, cargo: Cargo, version: int, *, alias: bool) -> Metrics:
        """Give the engine what the executor brought. `alias`: as for `Rollout.load_weights`."""
        with _alone():
            if cargo.adapters:
                self._add(Cargo([(name, tensor.clone()) for name, tensor in cargo.weights], cargo.adapters), version)
            else:
                self._forget_base()
                self._engine.load_weights(cargo.weights, version, alias=alias)
        return {"sync/bytes": Metric(0 if alias else cargo.num_bytes, reducer="max")}

    def take_offer(self, offer: Offer) -> Metrics:
        """Receive what a trainer offers, and give it to the engine. Raises RunError if it does not come whole."""
        if self._receiver is None:
            raise RunError("weights are offered, and the config names no transport")
        arriving = self._receiver.receive(offer)
        with _alone():
            if offer.table.adapters:
                self._add(unpacked(offer.table, arriving), offer.version)
            else:
                self._forget_base()
                self._engine.load_weights(named(arriving), offer.version)
        return {"sync/num_damaged": Metric(self._receiver.num_damaged, 1.0, "sum")}

    def close(self) -> None:
        """Let go of the transport and of what was kept."""
        self._forget_base()
        if self._receiver is not None:
            self._receiver.close()

    def _add(self, cargo: Cargo, version: int) -> None:
        """Keep the weights, where some came, and give the engine the sum; the tensors are this object's own, and
        nobody writes into them, so that the engine may use them."""
        if cargo.weights:
            self._base = dict(cargo.weights)
            self.base_fingerprint = fingerprint(self._base.items())
        if not self._base:
            raise RunError("adapters came to a generator that has nothing to add them to")
        self._engine.load_weights(_merged(self._base, cargo), version, alias=True)

    def _forget_base(self) -> None:
        self._base, self.base_fingerprint = {}, ""


def _merged(base: dict[str, Tensor], cargo: Cargo) -> Iterator[tuple[str, Tensor]]:
    additions = dict(cargo.adapters)
    unknown = additions.keys() - base.keys()
    if unknown:
        raise RunError(f"an adapter came for {min(unknown)!r}, which is no weight of the model")
    return ((name, additions[name].merge(tensor) if name in additions else tensor) for name, tensor in base.items())


@contextmanager
def _alone() -> Iterator[None]:
    """Copy without further threads: the trainer and the other generators of a machine are at work as well, and threads
    that wait for each other then cost many times what they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
