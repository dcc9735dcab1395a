"""Experts drawn by Gumbel noise, with straight-through gradients that reach those that were not chosen.

Gumbel-softmax: arXiv:1611.01144, arXiv:1611.00712; the k largest of perturbed logits are a draw of k experts without
replacement (arXiv:1903.06059). Forward, the chosen experts weigh what the model gives them; backward, the gradient is
that of the soft sample softmax((logits + noise) / temperature), in which every expert has a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollstock import RouterCall, Routing, hookimpl, option
from rollstock.plugins.routers._balance import BalancedRouter, BalanceOptions


@dataclass(kw_only=True)
class GumbelConfig(BalanceOptions):
    """Options of `router: {name: gumbel}`."""

    temperature: float = option(1.0, "temperature of the soft sample at the first step", minimum=1e-3, maximum=1_000)
    final_temperature: float = option(0.3, "temperature after `steps`", minimum=1e-3, maximum=1_000)
    steps: int = option(
        100, "steps over which the temperature goes from one to the other", minimum=1, maximum=1_000_000_000
    )
    schedule: Literal["exponential", "linear", "constant"] = option(
        "exponential", "how it gets there; constant: it stays at `temperature`"
    )
    noise: float = option(
        1.0, "scale of the Gumbel noise in the choice; 0: the model's own choice", minimum=0, maximum=1_000
    )


class Gumbel(BalancedRouter[GumbelConfig]):
    """Noise and temperature of a token are those of the policy version that it was sampled at, in training too. In
    evaluation there is no noise."""

    def route(self, call: RouterCall) -> Routing:
        """See `Router.route`."""
        if not call.tokens.exploring:
            return self.own(call)
        logits = call.logits.float()
        if self.config.noise:
            logits = logits + self.config.noise * -torch.log(-torch.log(call.uniforms(self.seed))).float()
        experts = call.choose(logits, bias=self.bias(call))
        soft = torch.softmax(logits / self.temperature(call.tokens.versions)[:, None], dim=-1).gather(-1, experts)
        hard = call.weights(experts)
        weights = hard.detach() + (soft - soft.detach()).to(hard.dtype)
        return Routing(experts=experts, weights=weights)

    def temperature(self, versions: Tensor) -> Tensor:
        """[n] float32: the temperature of tokens by the policy version that read them, [n]; version 1 is the first
        step's."""
        config = self.config
        first, last = config.temperature, config.final_temperature
        if config.schedule == "constant":
            return torch.full_like(versions, first, dtype=torch.float32)
        progress = ((versions - 1).float() / config.steps).clamp(0.0, 1.0)
        if config.schedule == "linear":
            return first + (last - first) * progress
        return first * (last / first) ** progress


@hookimpl
def rollstock_router() -> type[Gumbel]:
    """Give the router class."""
    return Gumbel
