"""REINFORCE++-baseline, arXiv:2501.03262: centred within the group, scaled by the whole batch.

Each prompt is sampled several times. The reward less its group's mean is scaled to mean 0 and variance 1 over all
tokens of the step: unlike GRPO's division within a group, this does not blow up groups that hardly differ. Divergence
from the reference goes into the loss, by the estimator k2. Assumes rewards of one scale for all prompts. A group whose
rewards are all equal is at the mean of the batch: its advantages are 0, but for the mean of tokens not being that of
responses.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rollstock import Batch, Loss, MicroBatch, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.functional import KLKind
from rollstock.algorithms.group_relative import BaselineOptions, GroupBaseline
from rollstock.algorithms.policy_loss import ClipOptions, clipped_loss


@dataclass(kw_only=True)
class ReinforcePPBaselineConfig(ClipOptions, BaselineOptions):
    """Options of REINFORCE++-baseline."""

    whiten: bool = option(True, "scale advantages to unit variance, around 0, over the batch; off, only centred")
    kl_kind: KLKind = option("k2", "estimator of the KL divergence in the loss; k2, k1+ and k3+ have its true gradient")


class ReinforcePPBaseline(GroupBaseline[ReinforcePPBaselineConfig]):
    """Rewards centred in their group, then normalised over the batch."""

    def sequence_advantages(self, batch: Batch) -> Tensor:
        """`[B]`: each score less the mean of its group."""
        return F.group_normalise(batch.scores, batch.groups, std=None)

    def loss(self, micro: MicroBatch) -> Loss:
        """PPO's clipped surrogate, with the optional KL and entropy terms."""
        return clipped_loss(micro, self.config)


@hookimpl
def rollstock_algorithm() -> type[ReinforcePPBaseline]:
    """Give `ReinforcePPBaseline`."""
    return ReinforcePPBaseline
