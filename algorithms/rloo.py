"""REINFORCE leave-one-out (RLOO), arXiv:2402.14740: each sample's baseline is the mean of the others.

The whole response is one action: its advantage is its reward less the mean reward of the other samples of its prompt,
an estimate that the sample itself has no part in, so that the gradient is unbiased. Assumes an outcome reward. A
group whose rewards are all equal, and a sample without others, have advantages of 0. With one update a step the clip
never acts, and the loss is plain REINFORCE.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rollstock import Batch, Loss, MicroBatch, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.functional import AggregationMode
from rollstock.algorithms.group_relative import BaselineOptions, GroupBaseline
from rollstock.algorithms.policy_loss import ClipOptions, clipped_loss


@dataclass(kw_only=True)
class RLOOConfig(ClipOptions, BaselineOptions):
    """Options of RLOO."""

    aggregation: AggregationMode = option(
        "seq_mean_token_sum", "how losses of tokens become one number; a sum over each response makes it one action"
    )


class RLOO(GroupBaseline[RLOOConfig]):
    """Rewards less the mean of the group's other samples."""

    def sequence_advantages(self, batch: Batch) -> Tensor:
        """`[B]`: each score less the mean of the others in its group."""
        return F.leave_one_out(batch.scores, batch.groups)

    def loss(self, micro: MicroBatch) -> Loss:
        """PPO's clipped surrogate, with the optional KL and entropy terms."""
        return clipped_loss(micro, self.config)


@hookimpl
def rollstock_algorithm() -> type[RLOO]:
    """Give `RLOO`."""
    return RLOO
