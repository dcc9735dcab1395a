"""The experts that generation chose, used again in training, so that both compute the same log-probs.

Rollout routing replay (R3), arXiv:2510.11370. Engine and trainer round differently, and a rounding error that changes
an expert changes a token's probability by far more than rounding. In generation the model chooses, and its choice is
kept; in training the same experts are taken, while their weights come from the logits of the training pass, so that
the router learns. Tokens without a captured choice get the model's own, and are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollstock import RouterCall, Routing, hookimpl
from rollstock.plugins.routers._balance import BalancedRouter, BalanceOptions


@dataclass(kw_only=True)
class ReplayConfig(BalanceOptions):
    """Options of `router: {name: replay}`."""


class Replay(BalancedRouter[ReplayConfig]):
    """Costs layers x k bytes a token in the batch (twice that from 256 experts on)."""

    captures = True

    def route(self, call: RouterCall) -> Routing:
        """See `Router.route`."""
        own, replayed = self.own(call), call.replayed()
        if replayed is None:
            return own
        experts = torch.where(replayed >= 0, replayed, own.experts)
        return Routing(experts=experts, weights=call.weights(experts))


@hookimpl
def rollstock_router() -> type[Replay]:
    """Give the router class."""
    return Replay
