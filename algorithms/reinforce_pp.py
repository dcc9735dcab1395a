"""REINFORCE++, arXiv:2501.03262: discounted returns, normalised over the whole batch, and PPO's clip.

There is no critic, and a prompt needs only one sample: the batch is the baseline. A token's reward is the score, if it
is the last, less a KL penalty; its return is the discounted sum from there on; returns are then scaled to mean 0 and
variance 1 over all tokens of the step. Assumes a batch of many prompts, of like difficulty. If all returns are equal,
all advantages are 0. A response without action tokens has no place for its score and carries no signal.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rollstock import Batch, Loss, MicroBatch, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.kl_control import KLPenalised, KLPenaltyOptions
from rollstock.algorithms.policy_loss import ClipOptions, clipped_loss


@dataclass(kw_only=True)
class ReinforcePPConfig(ClipOptions, KLPenaltyOptions):
    """Options of REINFORCE++."""

    group_size: int = option(1, "samples per prompt", minimum=1, maximum=100_000)
    gamma: float = option(1.0, "discount of a token's successors", minimum=0, maximum=1)


class ReinforcePP(KLPenalised[ReinforcePPConfig]):
    """Advantages normalised over the batch, a clipped policy loss, and a KL penalty in the reward."""

    def advantages(self, batch: Batch) -> Tensor:
        """`[B, T]`: the returns, whitened over all action tokens of the batch."""
        return F.reinforce_pp(self.penalised_rewards(batch), batch.mask, gamma=self.config.gamma)

    def loss(self, micro: MicroBatch) -> Loss:
        """PPO's clipped surrogate, with the optional KL and entropy terms."""
        return clipped_loss(micro, self.config)


@hookimpl
def rollstock_algorithm() -> type[ReinforcePP]:
    """Give `ReinforcePP`."""
    return ReinforcePP
