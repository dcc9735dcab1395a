"""Clipped importance-sampling weight policy optimisation (CISPO), arXiv:2506.13585, equations 4 and 5.

Advantages are GRPO's. The clipped ratio is a constant weight on each token's log-prob, so that a token far from the
old policy still teaches, only not more than its bound; PPO's clip drops it. Assumes that rare tokens matter (the forks
of a long chain of thought). The default range leaves the weight unbounded below, as the paper does, and bounds it by
5 above, as arXiv:2510.13786 does; with one update a step the ratio is 1, and the method is REINFORCE.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollstock import Loss, MicroBatch, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.group_relative import GroupOptions, GroupRelative
from rollstock.algorithms.policy_loss import RangeOptions, with_terms


@dataclass(kw_only=True)
class CISPOConfig(RangeOptions, GroupOptions):
    """Options of CISPO."""

    clip: float = option(1.0, "how far below 1 a weight may be; 1 is no bound", minimum=0, maximum=1e6)
    clip_high: float | None = option(
        4.0, "how far above 1 a weight may be; null: as far as below", minimum=0, maximum=1e6
    )


class CISPO(GroupRelative[CISPOConfig]):
    """GRPO's advantages, with the clipped ratio as a weight that carries no gradient."""

    def loss(self, micro: MicroBatch) -> Loss:
        """Weighted log-probs, with the optional KL and entropy terms."""
        losses, clipped = F.cispo_loss(
            micro.logprobs,
            micro.old_logprobs,
            micro.advantages,
            eps_low=self.config.clip,
            eps_high=self.config.upper,
        )
        return with_terms(micro, losses, self.config, {"actor/pg_clipfrac": micro.mean(clipped)})


@hookimpl
def rollstock_algorithm() -> type[CISPO]:
    """Give `CISPO`."""
    return CISPO
