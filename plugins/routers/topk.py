"""The model's own choice of experts, bit for bit; with balancing, where an option asks for it.

For runs that want the metrics and the balancing of a router without another choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollstock import RouterCall, Routing, hookimpl
from rollstock.plugins.routers._balance import BalancedRouter, BalanceOptions


@dataclass(kw_only=True)
class TopKConfig(BalanceOptions):
    """Options of `router: {name: topk}`."""


class TopK(BalancedRouter[TopKConfig]):
    """The experts with the highest scores, weighed as the model weighs them."""

    def route(self, call: RouterCall) -> Routing:
        """See `Router.route`."""
        return self.own(call)


@hookimpl
def rollstock_router() -> type[TopK]:
    """Give the router class."""
    return TopK
