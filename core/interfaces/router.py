"""The router kind: what chooses the experts of a mixture-of-experts layer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollstock.plugin import C, Plugin

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Routing:
    """For n tokens and k chosen experts of E: `experts` [n, k] int64, `weights` [n, k], `probabilities` [n, E]."""

    experts: Tensor
    weights: Tensor
    probabilities: Tensor


class Router(Plugin[C]):
    """Chooses experts from a layer's router logits; gradients reach the logits through `weights`."""

    @abstractmethod
    def route(self, logits: Tensor, *, layer: int, top_k: int, training: bool, normalise: bool) -> Routing:
        """Choose `top_k` experts for every token from `logits` [n, E]; normalise: the weights of a token sum to 1."""

    def state(self) -> dict[str, Any]:
        """What must survive a restart (a temperature schedule, balancing biases), as JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
