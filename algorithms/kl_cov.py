"""KL-Cov: a KL penalty on the tokens of highest covariance, arXiv:2505.22617, section 4.2.

Advantages are GRPO's. Entropy falls fastest through tokens that are both likely and well rewarded, or unlikely and ill
rewarded; the `fraction` of tokens with the highest covariance of log-prob and advantage is held near the policy that
sampled by a penalty, and the ratio of the others is free: there is no clip. Assumes several updates a step; with one,
the ratio is 1, the penalty 0, and the method plain policy gradient. If all advantages are equal, every covariance is 0,
and no token is held.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rollstock import Batch, Loss, MicroBatch, hookimpl, option
from rollstock.algorithms import functional as F
from rollstock.algorithms.covariance import CovarianceMethod, CovarianceOptions, largest
from rollstock.algorithms.functional import KLKind
from rollstock.algorithms.policy_loss import with_terms


@dataclass(kw_only=True)
class KLCovConfig(CovarianceOptions):
    """Options of KL-Cov."""

    cov_coef: float = option(1.0, "weight of the penalty on the tokens that are held back", minimum=0, maximum=1_000)
    cov_kind: KLKind = option("abs", "estimator of that penalty; abs pulls as hard from near as from afar, k2 does not")


class KLCov(CovarianceMethod[KLCovConfig]):
    """Policy gradient with a penalty on the few tokens whose covariance is highest."""

    def hold_back(self, batch: Batch, covariance: Tensor, most: int) -> Tensor:
        """`[B, T]` bool: the `most` tokens of the highest covariance; none where there is none to rank."""
        return largest(covariance, most) & (covariance != 0)

    def loss(self, micro: MicroBatch) -> Loss:
        """The plain surrogate, the penalty, and the optional KL and entropy terms."""
        losses, _ = F.clipped_surrogate(
            micro.logprobs, micro.old_logprobs, micro.advantages, eps_low=1.0, eps_high=math.inf
        )
        penalty = F.kl_estimate(micro.logprobs, micro.old_logprobs, kind=self.config.cov_kind)
        losses = losses + self.config.cov_coef * torch.where(micro.held_back, penalty, 0.0)
        return with_terms(micro, losses, self.config, {"actor/held_back": micro.mean(micro.held_back)})


@hookimpl
def rollstock_algorithm() -> type[KLCov]:
    """Give `KLCov`."""
    return KLCov
