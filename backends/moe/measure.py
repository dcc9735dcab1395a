"""What the routing of an update looked like: load per expert, entropy, dropped tokens.

For backends. Counts add up over the micro-batches of an update, and only then become metrics: the largest load of a
slice says nothing about that of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rollstock import Metric, Metrics, RouterLayer, Routing

MAX_LOADS = 256
"""How many experts, of all layers together, may have a metric each; with more, only their summaries are recorded."""


class RoutingCounts:
    """Counts over the response tokens of one update."""

    def __init__(self, layers: Sequence[RouterLayer]) -> None:
        self._layers = list(layers)
        self.load = torch.zeros(len(layers), max(layer.num_experts for layer in layers), dtype=torch.float64)
        self._entropy = 0.0
        self._dropped = 0
        self._tokens = 0  # of all layers together
        self._asked = 0  # tokens that should have been captured
        self._replayed = 0

    @torch.no_grad()
    def add(self, routings: Sequence[Routing], *, captured: Tensor | None = None) -> None:
        """Add the routing of n tokens by each layer; captured [n] bool: which of them had captured experts, if any
        had."""
        for layer, routing in zip(self._layers, routings, strict=True):
            counts = torch.bincount(routing.experts.flatten(), minlength=layer.num_experts)
            self.load[layer.index, : layer.num_experts] += counts.cpu()
            self._dropped += int((routing.weights == 0).any(dim=-1).sum())
            assert routing.probabilities is not None
            self._entropy += float(torch.special.entr(routing.probabilities.detach().double()).sum())
            self._tokens += len(routing.experts)
        if captured is not None:
            self._asked += len(captured)
            self._replayed += int(captured.sum())

    def add_others(self, add_up: Callable[[Tensor], None]) -> None:
        """Add the counts of other processes; `add_up` turns a tensor, in place, into the sum of all processes'."""
        counts = (self._entropy, self._dropped, self._tokens, self._asked, self._replayed)
        every = torch.cat([self.load.flatten(), torch.tensor(counts, dtype=torch.float64)])
        add_up(every)
        self.load = every[: self.load.numel()].view_as(self.load)
        self._entropy, *others = every[self.load.numel() :].tolist()
        self._dropped, self._tokens, self._asked, self._replayed = map(int, others)

    def metrics(self) -> Metrics:
        """`moe/...`; nothing if no token was routed.

        Loads are shares of a layer's assignments. `moe/max_violation` is the largest load over the mean one, less 1
        (arXiv:2408.15664, equation 4): 0 is even.
        """
        if self._tokens == 0:
            return {}
        violations, idle, loads = [], 0, {}
        per_expert = sum(layer.num_experts for layer in self._layers) <= MAX_LOADS
        for layer in self._layers:
            load = self.load[layer.index, : layer.num_experts]
            total = float(load.sum())
            violations.append(float(load.max()) * layer.num_experts / total - 1)
            idle += int((load == 0).sum())
            for expert in range(layer.num_experts) if per_expert else ():
                name = f"moe/load/layer_{layer.index:02d}/expert_{expert:03d}"
                loads[name] = Metric(float(load[expert]) / total, total)
        metrics = {
            "moe/max_violation": Metric(sum(violations) / len(violations), self._tokens),
            "moe/max_violation_worst": Metric(max(violations), 1.0, "max"),
            "moe/num_idle_experts": Metric(idle, 1.0),
            "moe/entropy": Metric(self._entropy / self._tokens, self._tokens),
            "moe/dropped_tokens": Metric(self._dropped, 1.0, "sum"),
            **loads,
        }
        if self._asked:
            metrics["moe/replayed_share"] = Metric(self._replayed / self._asked, self._asked)
        return metrics
