"""A router plugin at work in packed streams: what it is told of the tokens, what it costs and measures in an update.

For the torch backend, in runs with a router. Only response tokens count for load, metrics and balancing: a prompt may
stand in the stream once or many times, as the batch happens to be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollstock import Batch, Metric, Metrics, PackedTokens, RoutedTokens, Router, Totals, derive_seed, merge_metrics
from rollstock.backends.moe import Record, RoutedModel, RoutingCounts
from rollstock.backends.torch.layout import Layout
from rollstock.routing import missing, token_keys

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COLUMN = "routed_experts"


class StreamRouting:
    """The router of one model; `routed` is the model that asks it."""

    def __init__(self, model: PreTrainedModel, router: Router[Any], model_seed: int) -> None:
        self.routed = RoutedModel(model, router, seed=derive_seed(model_seed, "router"))
        self._router = router
        self._counts = RoutingCounts(self.routed.layers)

    def marks(self, batch: Batch) -> list[Hashable]:
        """For each trajectory, what its prompt must have in common with another's for the two to be one in the stream:
        the version that it was read at, and the experts that it was given then."""
        versions = token_versions(batch)
        starts = _starts(batch.packed())
        first = versions[starts].tolist()
        if COLUMN not in batch:
            return list(first)
        prompts = batch.prompt_column(COLUMN)
        return [(version, experts.numpy().tobytes()) for version, experts in zip(first, prompts, strict=True)]

    def tokens(self, batch: Batch, layout: Layout) -> RoutedTokens:
        """What the router is told of the stream of a batch, on the CPU.

        Responses of no version (-1) are held-out ones of an offline algorithm, whose loss is measured without noise.
        """
        chosen = batch.flat("versions")[batch.flat("action_mask")]
        captured = batch.packed_column(COLUMN)[layout.source] if COLUMN in batch else None
        return RoutedTokens(
            keys=packed_keys(batch.packed())[layout.source],
            versions=token_versions(batch)[layout.source],
            captured=captured,
            exploring=not bool((chosen < 0).any()),
        )

    def observe(self, record: Record, batch: Batch, layout: Layout, totals: Totals) -> tuple[Tensor | None, Metrics]:
        """Count a micro-batch that was just read; returns the router's loss of it, and that as a metric.

        Trajectories in which the policy chose nothing do not count.
        """
        rows = batch.rows()
        acts = batch.mask.any(dim=1)[rows]  # a slice of trajectories without any action is not read at all
        rows, index = (each[acts].to(record.tokens.keys.device) for each in (rows, layout.responses))
        routings = [record.routing(layer.index, index) for layer in self.routed.layers]
        captured = record.tokens.captured
        known = None if captured is None else (captured[index] != missing(captured.dtype)).flatten(1).all(dim=1)
        self._counts.add(routings, captured=known)
        loss = self._router.auxiliary_loss(routings, rows, totals.sequences)
        if loss is None:
            return None, {}
        return loss, {"moe/auxiliary_loss": Metric(float(loss.detach()), 1.0, "sum")}

    def forget(self) -> None:
        """Count anew, since the micro-batches of this update are read again."""
        self._counts = RoutingCounts(self.routed.layers)

    def finish_update(self, add_up: Callable[[Tensor], None] | None = None) -> Metrics:
        """Tell the router of the load of an update; returns what was measured, and begins to count anew.

        add_up: turns a tensor, in place, into the sum of those of all processes, which then call this together.
        """
        counts, self._counts = self._counts, RoutingCounts(self.routed.layers)
        if add_up is not None:
            counts.add_others(add_up)
        metrics = counts.metrics()
        return merge_metrics([metrics, self._router.after_update(counts.load)]) if metrics else metrics


def packed_keys(packed: PackedTokens) -> Tensor:
    """[L] int64: for each token of a packed stream, the key of its sequence so far (see `prefix_keys` of the core)."""
    sums = token_keys(packed.tokens, packed.positions).cumsum(0)
    starts = _starts(packed)
    before = torch.where(starts > 0, sums[starts - 1], 0)
    return sums - torch.repeat_interleave(before, packed.lengths)


def token_versions(batch: Batch) -> Tensor:
    """[L] int64: the policy version at which each token of the packed stream was read in generation.

    That is the version that sampled the next token: one that the policy did not choose, a prompt's included, is read
    when the policy goes on. What follows the last chosen token has that one's; where the policy chose none, it is 0.
    """
    packed = batch.packed()
    chosen = torch.zeros(len(packed.tokens), dtype=torch.bool)
    versions = torch.zeros(len(packed.tokens), dtype=torch.int64)
    where = packed.predicts + 1
    chosen[where] = batch.flat("action_mask")
    versions[where] = batch.flat("versions")
    place = torch.arange(len(chosen))
    end = len(chosen)
    following = torch.where(chosen, place, end).flip(0).cummin(0).values.flip(0)  # the next chosen token, this included
    preceding = torch.where(chosen, place, -1).cummax(0).values
    starts = _starts(packed)
    first = torch.repeat_interleave(starts, packed.lengths)
    last = torch.repeat_interleave(starts + packed.lengths - 1, packed.lengths)
    found = torch.where(following <= last, following, torch.where(preceding >= first, preceding, end))
    return torch.cat([versions, versions.new_zeros(1)])[found]


def _starts(packed: PackedTokens) -> Tensor:
    return torch.cumsum(packed.lengths, 0) - packed.lengths
