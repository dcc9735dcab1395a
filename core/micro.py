"""What an algorithm's loss sees: a slice of the batch with the model's outputs, and the counts of the whole batch.

For algorithm authors. A loss is written once, for `[B, T]` tensors, and gives the same gradient however the batch was
cut, because `MicroBatch.loss` divides by the counts of the whole mini-batch (`Totals`), never by those of the slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from rollstock.batch import Batch
from rollstock.errors import RunError
from rollstock.metrics import Metric, Metrics
from rollstock.reduction import AggregationMode, aggregate


@dataclass(frozen=True)
class Totals:
    """Counts over one optimizer update: every micro-batch on every rank.

    tokens: action tokens; sequences: trajectories with at least one action token; groups: groups with at least one;
    response_limit: the most tokens that a response may have, a constant of the run.
    """

    tokens: int
    sequences: int
    groups: int
    response_limit: int

    @staticmethod
    def of(batch: Batch, *, response_limit: int) -> Totals:
        """The counts of a whole mini-batch."""
        acting = _acting(batch)
        groups = int(batch.groups[acting].unique().numel())
        return Totals(int(batch.flat("action_mask").sum()), int(acting.sum()), groups, response_limit)


@dataclass
class Loss:
    """A scalar to differentiate, already divided by the global counts (losses of slices add up), and its metrics."""

    value: Tensor  # []
    metrics: Metrics = field(default_factory=dict)


class MicroBatch:
    """A slice of b trajectories, padded to `[b, T]`, with what the model in training says of it.

    `logprobs` (and `entropy` or `values`, if the algorithm asked for them) are `[b, T]` and carry gradients; every
    column of the batch is an attribute without one. Reading a column that nobody provides raises AttributeError with
    what is there.
    """

    def __init__(self, batch: Batch, totals: Totals, outputs: Mapping[str, Tensor]) -> None:
        """`outputs` holds the model's `[b, T]` tensors, by name; they come before a column of the same name."""
        self.batch = batch
        self.totals = totals
        self._outputs = dict(outputs)
        self.mask: Tensor = batch.mask  # [b, T] bool

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._outputs:
            return self._outputs[name]
        if name == "old_logprobs" and name not in self.batch:
            # One update a step: the policy that sampled is the policy in training, so its log-probs are the old ones.
            return self._outputs["logprobs"].detach()
        value: Tensor = getattr(self.batch, name)
        return value

    def loss(
        self,
        losses: Tensor,
        metrics: Mapping[str, Metric] | None = None,
        *,
        mode: AggregationMode = "token_mean",
        name: str = "actor/pg_loss",
    ) -> Loss:
        """Reduce losses per token `[b, T]` to this slice's share of the mini-batch's loss, recorded as the metric
        `name`.

        `mode` is how tokens and sequences are averaged (see `aggregate`). Values in masked slots do not count.

        Where the batch has the column `token_weights` `[b, T]`, each token's loss is multiplied by its weight first: an
        extension corrects for the sampler in that way, whatever the algorithm. The counts stay those of all action
        tokens and sequences, so that a weight of 0 takes a loss out and leaves the others as they are.
        """
        if "token_weights" in self.batch:
            losses = losses * self.batch["token_weights"]
        by_tokens = mode in ("token_mean", "token_sum")
        whole, part = (
            (self.totals.tokens, int(self.mask.sum()))
            if by_tokens
            else (self.totals.sequences, int(self.mask.any(dim=1).sum()))
        )
        if mode == "token_sum":
            denominator = None
        elif mode == "seq_mean_token_sum_norm":
            denominator = whole * self.totals.response_limit
        else:
            denominator = whole
        value = aggregate(losses, self.mask, mode=mode, denominator=denominator)
        share = part / whole if whole else 0.0
        recorded = Metric(float(value.detach()) / share, share) if share else Metric(0.0, 0.0)
        return Loss(value, {name: recorded, **(metrics or {})})

    def group_loss(
        self, losses: Tensor, metrics: Mapping[str, Metric] | None = None, *, name: str = "actor/pg_loss"
    ) -> Loss:
        """The same for losses of whole groups, of algorithms that set `whole_groups`: their sum, divided by the groups
        of the mini-batch.

        `losses`, of any shape, must add up to one loss for each group of this slice. Groups without an action token are
        not counted, so theirs must be 0. Raises RunError where the column `token_weights` asks for anything but 1: a
        comparison of responses has no loss of single tokens to weigh.
        """
        if "token_weights" in self.batch and bool((self.batch["token_weights"] != 1)[self.mask].any()):
            raise RunError(
                "an extension weighs losses by the column `token_weights`, but the loss of this algorithm is one of "
                "whole groups, which has no tokens to weigh; leave the extension out, or choose another algorithm"
            )
        part, whole = int(self.batch.groups[_acting(self.batch)].unique().numel()), self.totals.groups
        value = losses.sum() / max(whole, 1)
        recorded = Metric(float(losses.detach().double().sum()) / part, part) if part else Metric(0.0, 0.0)
        return Loss(value, {name: recorded, **(metrics or {})})

    def mean(self, values: Tensor) -> Metric:
        """A metric: the mean over action tokens of `values` `[b, T]`."""
        count = int(self.mask.sum())
        picked = values.detach()[self.mask]
        return Metric(float(picked.double().mean()), count) if count else Metric(0.0, 0.0)

    def max(self, values: Tensor) -> Metric:
        """A metric: the largest of `values` `[b, T]` over action tokens."""
        picked = values.detach()[self.mask]
        return Metric(float(picked.max()), 1.0, "max") if len(picked) else Metric(-torch.inf, 1.0, "max")


def _acting(batch: Batch) -> Tensor:
    """[B] bool: the trajectories with at least one action token."""
    mask = batch.mask
    return mask.any(dim=1) if mask.numel() else mask.new_zeros(len(batch))


LossFunction: TypeAlias = Callable[[MicroBatch], Loss]
