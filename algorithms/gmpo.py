"""Geometric-mean policy optimisation (GMPO), arXiv:2507.20673, section 3.

Advantages are GRPO's; a response's objective is its advantage times the geometric mean of its tokens' ratios, each
clipped beforehand, on the side that its advantage pushes to. An outlier among the ratios moves a geometric mean little,
so the range may be wide: it is one of log ratios, and 0.4 means exp(-0.4) to exp(0.4). Assumes that a response shares
one advantage (the mean is taken where tokens differ). A response without action tokens has the ratio 1 and no loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollstock import Loss, MicroBatch, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.functional import AggregationMode
from rollstock.algorithms.group_relative import GroupOptions, GroupRelative
from rollstock.algorithms.policy_loss import RangeOptions, sequence_advantages, with_terms


@dataclass(kw_only=True)
class GMPOConfig(RangeOptions, GroupOptions):
    """Options of GMPO."""

    clip: float = option(0.4, "clip range of a token's log ratio", minimum=0, maximum=1e6)
    aggregation: AggregationMode = option("seq_mean_token_mean", "how losses of tokens become one number")


class GMPO(GroupRelative[GMPOConfig]):
    """GRPO's advantages, with the geometric mean of clipped ratios."""

    def loss(self, micro: MicroBatch) -> Loss:
        """The loss of each response on all its tokens, with the optional KL and entropy terms."""
        advantages = sequence_advantages(micro)  # [b]
        sign = advantages.sign()[:, None]
        log_ratio = micro.logprobs - micro.old_logprobs
        bounded = log_ratio.clamp(-self.config.clip, self.config.upper)
        clipped = sign * log_ratio > sign * bounded
        held = torch.where(clipped, bounded, log_ratio)
        losses = -advantages * F.gspo_ratio(held, torch.zeros_like(held), micro.mask)  # [b]
        return with_terms(
            micro,
            losses[:, None].expand(micro.mask.shape),
            self.config,
            {"actor/pg_clipfrac": micro.mean(clipped)},
        )


@hookimpl
def rollstock_algorithm() -> type[GMPO]:
    """Give `GMPO`."""
    return GMPO
