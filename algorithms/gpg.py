"""Group policy gradient (GPG), arXiv:2504.02546: REINFORCE with the group's mean, and little else.

No ratio, no clip, no critic, no reference: the loss of a token is -logprob * A, averaged over all tokens, with
A = B / (B - M) * (r - mean of the group). Of B samples, M are in groups whose rewards are all equal: they add
nothing to the gradient and still count in its divisor, which the factor makes good. Assumes on-policy data: with
several updates a step nothing corrects for a policy that has moved. If all groups are uniform, all advantages are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rollstock import Batch, Loss, MicroBatch, hookimpl, option
from rollstock.algorithms.group_relative import GroupOptions, GroupRelative, Scale, has_spread
from rollstock.algorithms.policy_loss import with_terms

Correction = Literal["uniform_groups", "zero_scores", "none"]


@dataclass(kw_only=True)
class GPGConfig(GroupOptions):
    """Options of GPG."""

    scale: Scale = option("none", "standard deviation that divides rewards within a group; none only centres them")
    correction: Correction = option(
        "uniform_groups",
        "samples that the factor makes up for: those of groups whose rewards are all equal; those with a score of 0, "
        "as verl counts; or none",
    )


class GPG(GroupRelative[GPGConfig]):
    """Rewards centred in their group, and the plain policy gradient."""

    def token_advantages(self, batch: Batch) -> Tensor:
        """`[B, T]`: the centred scores, times the factor of this batch."""
        return self.factor(batch) * super().token_advantages(batch)

    def factor(self, batch: Batch) -> float:
        """B / (B - M); 1 where nothing is left to divide by."""
        if self.config.correction == "none":
            return 1.0
        by_groups = self.config.correction == "uniform_groups"
        counted = has_spread(batch.scores, batch.groups) if by_groups else batch.scores != 0
        return len(batch) / (int(counted.sum()) or len(batch) or 1)

    def loss(self, micro: MicroBatch) -> Loss:
        """The policy gradient, with the optional KL and entropy terms."""
        return with_terms(micro, -micro.logprobs * micro.advantages, self.config, {})


@hookimpl
def rollstock_algorithm() -> type[GPG]:
    """Give `GPG`."""
    return GPG
