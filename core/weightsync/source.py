"""A trainer's weights as the worker hands them out: all of them, or the adapters alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollstock.errors import RunError
from rollstock.interfaces.backend import Backend
from rollstock.metrics import Metrics
from rollstock.weights import fingerprint
from rollstock.weightsync.cargo import Cargo
from rollstock.weightsync.sender import Offer, WeightSender


class WeightSource:
    """The weights of one worker's backend.

    Of several workers that hold parts, all are asked for the same at the same time; only the one without `is_counted`
    keeps nothing of what it put together. sender: None where the executor carries the weights.
    """

    def __init__(self, backend: Backend[Any], sender: WeightSender | None, *, is_counted: bool) -> None:
        self._backend = backend
        self._sender = sender
        self._is_counted = is_counted
        self._base = ""

    def cargo(self, *, adapters: bool, base: bool) -> Cargo:
        """The merged weights; or, with `adapters`, those, and with `base` what they are added to. Raises UserError for
        a backend that has no adapters to send."""
        weights = self._backend.base_weights() if adapters else self._backend.weights()
        additions = self._backend.adapters() if adapters else iter(())
        found = Cargo()
        if base or not adapters:
            for named in weights:
                if self._is_counted:
                    found.weights.append(named)
        for addition in additions:
            if self._is_counted:
                found.adapters.append(addition)
        return found

    def base_fingerprint(self) -> str:
        """The fingerprint of what the adapters are added to, which training does not change."""
        if not self._base:
            if self._is_counted:
                self._base = fingerprint(self._backend.base_weights())
            else:
                self._base = f"not looked at: {sum(1 for _ in self._backend.base_weights())} weights"
        return self._base

    def offer(self, version: int, inboxes: Sequence[str], *, adapters: bool, base: bool) -> Offer | None:
        """Begin to send; None from a worker that does not count."""
        cargo = self.cargo(adapters=adapters, base=base)
        if not self._is_counted:
            return None
        if self._sender is None:
            raise RunError("weights are to be offered, and the config names no transport")
        return self._sender.offer(cargo, version, inboxes)

    def finish(self) -> Metrics:
        """End what was offered; see `WeightSender.finish`."""
        return {} if self._sender is None else self._sender.finish()

    def close(self) -> None:
        """Let go of the transport."""
        if self._sender is not None:
            self._sender.close()
