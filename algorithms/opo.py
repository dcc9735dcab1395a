"""On-policy reinforcement learning with an optimal baseline (OPO), arXiv:2505.23585.

A = r - sum(n r) / sum(n) over the group: the baseline is its mean reward, weighted by the lengths n of the responses.
That one has the least variance if the squared gradient of a response grows with its length. Assumes exact on-policy
training: keep one update a step (`train.mini_batches: 1`, `train.epochs: 1`). A group whose rewards are all equal has
advantages of 0; an empty response has no weight, and no token that its own advantage could land on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollstock import Batch, Loss, MicroBatch, hookimpl, option
from rollstock.algorithms.functional import AggregationMode
from rollstock.algorithms.group_relative import BaselineOptions, GroupBaseline
from rollstock.algorithms.policy_loss import ClipOptions, clipped_loss


@dataclass(kw_only=True)
class OPOConfig(ClipOptions, BaselineOptions):
    """Options of OPO."""

    aggregation: AggregationMode = option(
        "seq_mean_token_sum", "how losses of tokens become one number; the baseline is optimal for sums over responses"
    )


class OPO(GroupBaseline[OPOConfig]):
    """Rewards less the group's mean, in which long responses count more."""

    def sequence_advantages(self, batch: Batch) -> Tensor:
        """`[B]`: each score less the length-weighted mean of its group."""
        return batch.scores - length_weighted_mean(batch.scores, batch.groups, batch.mask.sum(dim=1))

    def loss(self, micro: MicroBatch) -> Loss:
        """PPO's clipped surrogate, with the optional KL and entropy terms."""
        return clipped_loss(micro, self.config)


def length_weighted_mean(scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """For each of `[B]` the mean score of its group, weighted by `lengths`; its own score where all are empty."""
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    # Measured from a score of the group, equal scores have exactly that mean, whatever the rounding of the weights.
    anchor = torch.zeros_like(counts, dtype=scores.dtype).index_copy_(0, index, scores)
    weights = lengths.to(scores.dtype)
    total = torch.zeros_like(anchor).index_add_(0, index, weights)
    above = torch.zeros_like(anchor).index_add_(0, index, weights * (scores - anchor[index])) / total.clamp_min(1)
    return torch.where(total[index] > 0, (anchor + above)[index], scores)


@hookimpl
def rollstock_algorithm() -> type[OPO]:
    """Give `OPO`."""
    return OPO
