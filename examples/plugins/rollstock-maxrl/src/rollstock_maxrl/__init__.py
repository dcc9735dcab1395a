"""MaxRL: maximum likelihood reinforcement learning, arXiv:2602.02710.

Each prompt is sampled `group_size` times and scored right (1) or wrong (0). The gradient of log p, the
log-probability that a sample is right, is the mean of grad log-prob over the right ones. Dividing the centred reward
by the group's mean reward follows the series log p = -sum over k of (1 - p)^k / k, without bias, up to k = group_size
- 1. The rarer a prompt is solved, the more each solution counts: 1 / mean in place of GRPO's 1 / standard deviation.

Assumes rewards of 0 and 1; others that are not negative work by the same formula. A group in which nothing is right
has mean 0, says nothing about log p, and gets advantages of 0; so does one in which everything is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rollstock import Algorithm, Batch, Loss, Metric, MicroBatch, RunConfig, hookimpl, option
from rollstock.algorithms import functional as F
from torch import Tensor


@dataclass(kw_only=True)
class MaxRLConfig:
    """Options of MaxRL."""

    group_size: int = option(8, "samples per prompt: the more, the nearer to maximum likelihood", minimum=2)
    clip: float = option(0.2, "clip range of the probability ratio, for more than one update a step", minimum=0)


class MaxRL(Algorithm[MaxRLConfig]):
    """Advantages (reward - mean) / mean within a group, PPO's clipped loss, no critic."""

    needs = frozenset({"old_logprobs"})

    def validate(self, config: RunConfig) -> Sequence[str]:
        """Greedy sampling makes a group's samples, and so its rewards, all equal."""
        if config.sampling.temperature == 0:
            return ["sampling.temperature: 0 samples each prompt the same way every time; maxrl needs it above 0"]
        return []

    def advantages(self, batch: Batch) -> Tensor:
        """`[B, T]`: one advantage for each trajectory, on all tokens that the policy chose."""
        return maxrl_advantages(batch.scores, batch.groups)[:, None] * batch.mask

    def loss(self, micro: MicroBatch) -> Loss:
        """The clipped surrogate of each token; with one update a step its gradient is the plain policy gradient."""
        losses, clipped = F.clipped_surrogate(
            micro.logprobs, micro.old_logprobs, micro.advantages, eps_low=self.config.clip, eps_high=self.config.clip
        )
        return micro.loss(losses, {"actor/pg_clipfrac": micro.mean(clipped)})

    def after_update(self, batch: Batch, metrics: object) -> dict[str, Metric]:
        """Record how many groups had no right sample: what MaxRL cannot learn from yet."""
        means = group_means(batch.scores, batch.groups)
        groups = batch.groups.unique()
        unsolved = sum(bool((means[batch.groups == group] <= 0).all()) for group in groups)
        return {"maxrl/unsolved_groups": Metric(unsolved / max(len(groups), 1), len(groups))}


def group_means(scores: Tensor, groups: Tensor) -> Tensor:
    """`[B]`: the mean score of the group that each trajectory belongs to; groups are integers `[B]` in any order."""
    _, index = groups.unique(return_inverse=True)
    counts = torch.bincount(index)
    return (torch.zeros(len(counts)).index_add(0, index, scores) / counts)[index]


def maxrl_advantages(scores: Tensor, groups: Tensor) -> Tensor:
    """(score - mean) / mean of the group, `[B]`; 0 where the mean is 0 (or less, for scores that are not 0 and 1)."""
    means = group_means(scores, groups)
    return torch.where(means > 0, (scores - means) / means.clamp(min=1e-9), 0.0)


@hookimpl
def rollstock_algorithm() -> type[Algorithm[Any]]:
    """Give `MaxRL`."""
    return MaxRL
