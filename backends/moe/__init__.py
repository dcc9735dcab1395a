"""Mixture-of-experts models of transformers: their routers found, understood and replaced by a router plugin.

For the backends and engines of this folder, which put a `RoutedModel` around their model; and for whoever brings an
architecture whose routers are not understood, with `register_adapter`.
"""

from __future__ import annotations

from rollstock.backends.moe.find import RouterAdapter, find_routers, has_experts, register_adapter
from rollstock.backends.moe.measure import RoutingCounts
from rollstock.backends.moe.routed import Record, RoutedModel

__all__ = ["Record", "RoutedModel", "RouterAdapter", "RoutingCounts", "find_routers", "has_experts", "register_adapter"]
