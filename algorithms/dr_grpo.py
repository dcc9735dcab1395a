"""Dr. GRPO (GRPO done right), arXiv:2503.20783: GRPO without its two biases.

The advantage is the reward less the mean of its group, undivided, and the loss of a response is the sum over its
tokens, divided by a constant (the length limit) and not by its own length. GRPO's divisions favour prompts that are
nearly always or never solved, and long wrong answers. Assumes that rewards of different prompts are on one scale. A
group whose rewards are all equal has advantages of 0.
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
class DrGRPOConfig(ClipOptions, BaselineOptions):
    """Options of Dr. GRPO."""

    aggregation: AggregationMode = option(
        "seq_mean_token_sum_norm", "how losses of tokens become one number; the method is a division by a constant"
    )


class DrGRPO(GroupBaseline[DrGRPOConfig]):
    """Rewards centred in their group, losses divided by a constant."""

    def sequence_advantages(self, batch: Batch) -> Tensor:
        """`[B]`: each score less the mean of its group."""
        return F.group_normalise(batch.scores, batch.groups, std=None)

    def loss(self, micro: MicroBatch) -> Loss:
        """PPO's clipped surrogate, with the optional KL and entropy terms."""
        return clipped_loss(micro, self.config)


@hookimpl
def rollstock_algorithm() -> type[DrGRPO]:
    """Give `DrGRPO`."""
    return DrGRPO
