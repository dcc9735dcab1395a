"""Balancing of experts, as options that the routers of this folder share: an auxiliary loss, and biases without a loss.

For authors of routers beside these. What a router chooses is left to its own file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollstock import Metrics, Router, RouterCall, RouterLayer, Routing, option


@dataclass(kw_only=True)
class BalanceOptions:
    """How evenly tokens are spread over experts; both are off by default."""

    auxiliary_loss: float = option(
        0.0,
        "coefficient of the sequence-wise balance loss (arXiv:2412.19437, equation 17); 0: none",
        minimum=0,
        maximum=1_000,
    )
    bias_rate: float = option(
        0.0,
        "by how much an expert's bias changes after each update (arXiv:2408.15664); 0: no biases",
        minimum=0,
        maximum=10,
    )


B = TypeVar("B", bound=BalanceOptions)


class BalancedRouter(Router[B]):
    """A router with both ways of balancing. `biases` [layers, E] are added to the scores for the choice alone."""

    biases: Tensor | None = None

    def setup(self, layers: Sequence[RouterLayer], *, seed: int) -> None:
        """See `Router.setup`; biases start at 0."""
        self.seed = seed
        self.layers = list(layers)
        if self.config.bias_rate:
            self.biases = torch.zeros(len(layers), max(layer.num_experts for layer in layers))

    def bias(self, call: RouterCall) -> Tensor | None:
        """[E]: the biases of the call's layer, None without any."""
        if self.biases is None:
            return None
        return self.biases[call.layer.index, : call.layer.num_experts].to(call.logits.device)

    def own(self, call: RouterCall) -> Routing:
        """The model's own choice, with the biases where there are any."""
        bias = self.bias(call)
        if bias is None:
            return call.own
        experts = call.choose(bias=bias)
        return Routing(experts=experts, weights=call.weights(experts))

    def auxiliary_loss(self, layers: Sequence[Routing], rows: Tensor, num_sequences: int) -> Tensor | None:
        """The mean over layers and sequences of sum_e f_e P_e, times the coefficient; it is 1 where all is even.

        Within a sequence of T tokens, f_e is E / (k T) times the tokens that chose e, and P_e their mean probability of
        e. Per sequence, because only then do slices of a batch add up to the whole.
        """
        if not self.config.auxiliary_loss or len(rows) == 0:
            return None
        total = sum(_sequence_balance(routing, rows) for routing in layers)
        assert isinstance(total, Tensor)
        return self.config.auxiliary_loss * total / (len(layers) * max(num_sequences, 1))

    def after_update(self, load: Tensor) -> Metrics:
        """Raise the bias of every expert with less than the mean load, lower that of every one with more."""
        if self.biases is not None:
            for layer, counts in zip(self.layers, load, strict=True):
                counts = counts[: layer.num_experts].cpu()
                change = self.config.bias_rate * torch.sign(counts.mean() - counts).float()
                self.biases[layer.index, : layer.num_experts] += change
        return {}

    def state(self) -> dict[str, Any]:
        """The biases."""
        return {} if self.biases is None else {"biases": self.biases.tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Router.load_state`; a run that just got biases keeps its zeros."""
        if self.biases is not None and "biases" in state:
            self.biases = torch.tensor(state["biases"])


def _sequence_balance(routing: Routing, rows: Tensor) -> Tensor:
    """The sum over sequences of sum_e f_e P_e."""
    probabilities = routing.probabilities
    assert probabilities is not None
    count, num_experts = int(rows.max()) + 1, probabilities.shape[-1]
    chosen = torch.zeros_like(probabilities).scatter_(-1, routing.experts, 1.0)
    lengths = torch.bincount(rows, minlength=count).clamp_min(1).to(probabilities.dtype)[:, None]

    def by_sequence(values: Tensor) -> Tensor:
        return values.new_zeros(count, num_experts).index_add(0, rows, values) / lengths

    fractions = by_sequence(chosen) * (num_experts / routing.experts.shape[-1])
    return (fractions * by_sequence(probabilities)).sum()
