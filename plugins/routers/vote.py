"""Experts elected by draws at several temperatures: cold ones vote for what the model likes best, hot ones explore.

At each temperature t, k experts are drawn without replacement from softmax(logits / t), and have a vote each. The k
experts with most votes are chosen. Among equal votes the one that the model scores higher wins, and among equal scores
the one with the lower number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollstock import RouterCall, Routing, hookimpl, option
from rollstock.plugins.routers._balance import BalancedRouter, BalanceOptions


@dataclass(kw_only=True)
class VoteConfig(BalanceOptions):
    """Options of `router: {name: vote}`."""

    temperatures: list[float] = option([0.1, 0.5, 1.0], "one draw votes at each of these", minimum=1e-3, maximum=1_000)

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ValueError("`temperatures` is empty, so nobody would vote: name at least one")


class Vote(BalancedRouter[VoteConfig]):
    """The draws are seeded by what was read so far, so that generation and training elect the same experts. In
    evaluation the model chooses."""

    def route(self, call: RouterCall) -> Routing:
        """See `Router.route`."""
        if not call.tokens.exploring:
            return self.own(call)
        experts = elect(self.votes(call), call.choice_scores(bias=self.bias(call)), call.layer.top_k)
        return Routing(experts=experts, weights=call.weights(experts))

    @torch.no_grad()
    def votes(self, call: RouterCall) -> Tensor:
        """[n, E] int64: how many of the draws have each expert."""
        logits, bias = call.logits.float(), self.bias(call)
        votes = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
        for draw, temperature in enumerate(self.config.temperatures):
            noise = -torch.log(-torch.log(call.uniforms(self.seed, draw=draw))).float()
            drawn = call.choose(logits / temperature + noise, bias=bias)
            votes.scatter_add_(-1, drawn, torch.ones_like(drawn))
        return votes


def elect(votes: Tensor, scores: Tensor, count: int) -> Tensor:
    """[n, count] int64: the experts with most `votes` [n, E], then with the highest `scores` [n, E], then with the
    lowest number; best first."""
    by_score = scores.sort(dim=-1, descending=True, stable=True).indices
    by_votes = votes.gather(-1, by_score).sort(dim=-1, descending=True, stable=True).indices
    return by_score.gather(-1, by_votes)[:, :count]


@hookimpl
def rollstock_router() -> type[Vote]:
    """Give the router class."""
    return Vote
